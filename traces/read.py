#!/usr/bin/env python3
"""What is in a PyTorch profiler trace: which kernels ran, who launched them, what bounds the step.

    python read.py FILE             one step, kernel by kernel, and what bounds it
    python read.py A B              what changed from trace A to trace B, what stayed the same
    python read.py FILE --chain     the last step's dispatch chain: operators, launches, kernels
    python read.py FILE --json      the same facts for a program; also with A B
    python read.py FILE --open      look at it in Perfetto; nothing is uploaded
    python read.py FILE --perfetto OUT    write a copy of which Perfetto shows every event

It reads what torch.profiler's export_chrome_trace writes, .json or .json.gz, recorded on any GPU or
on none, and needs nothing but Python. A trace counts time in µs with three decimals; here a time is
a whole number of ns until it is printed, so that no digit is lost.
"""
import argparse
import gc
import itertools
import json
import os
import re
import sys
import textwrap
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from decimal import Decimal
from math import prod
from statistics import median

OVERHEAD = 1.5  # a step that takes more than this times its kernels' time is bound by launches
REACH = 0.25  # a kernel below this share of both roofs is bound by neither, as a tiny one is

OVERLAP = "events that overlap on a track, kept (Perfetto drops them: --perfetto OUT moves them)"
MEMORY = ("gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime")
CPU = ("cpu_op", "user_annotation", *LAUNCH)

# Dense bf16 and fp16 peak in TFLOP/s (no sparsity, fp32 accumulation) and memory bandwidth in GB/s,
# by the name that the driver reports. A GPU that is not here gets no share of a peak and no ridge.
PEAKS = {
    # NVIDIA A100 datasheets, 80 GB and 40 GB
    "NVIDIA A100-SXM4-80GB": (312, 2039), "NVIDIA A100 80GB PCIe": (312, 1935),
    "NVIDIA A100-SXM4-40GB": (312, 1555), "NVIDIA A100-PCIE-40GB": (312, 1555),
    # NVIDIA H100 and H200 datasheets, whose figures are with sparsity: halved
    "NVIDIA H100 80GB HBM3": (989.5, 3350), "NVIDIA H100 PCIe": (756.5, 2000),
    "NVIDIA H200": (989.5, 4800),
    "NVIDIA B200": (2250, 8000),  # NVIDIA HGX B200 datasheet, an eighth of the board, halved
    "NVIDIA L4": (121, 300),  # NVIDIA L4 datasheet, halved
    "Tesla T4": (65, 320),  # NVIDIA T4 datasheet; fp16 only
    "NVIDIA GeForce RTX 4090": (165.2, 1008),  # NVIDIA Ada GPU Architecture whitepaper, appendix A
    "AMD Instinct MI300X": (1307.4, 5300),  # AMD Instinct MI300X data sheet
}
DTYPES = {"c10::BFloat16": ("bf16", 2), "c10::Half": ("fp16", 2),
          "float": ("fp32", 4), "double": ("fp64", 8)}
# Which inputs of a GEMM are its two factors and its addend, -1 for none.
GEMM = {"aten::mm": (0, 1, -1), "aten::bmm": (0, 1, -1), "aten::linear": (0, 1, 2),
        "aten::addmm": (1, 2, 0), "aten::baddbmm": (1, 2, 0), "FusedGeGLU": (0, 1, -1)}
# How many tensors a pointwise operator reads; it writes one, of the shape that they broadcast to.
POINTWISE = {f"aten::{name}": reads for reads, names in (
    (1, "abs cos elu erf exp gelu hardtanh leaky_relu log neg reciprocal relu rsqrt sigmoid silu "
        "sin sqrt tanh"),
    (2, "add div gelu_backward maximum minimum mul pow sigmoid_backward silu_backward sub "
        "tanh_backward threshold_backward"),
    (3, "addcdiv addcmul clamp")) for name in names.split()}
POINTWISE |= {"LigerGELUMulFunction": 2, "LigerSiLUMulFunction": 2}
# On a CPU the outermost operators stand for kernels, but for those that only call others or rewrite
# a shape.
NO_WORK = {f"aten::{name}" for name in (
    "linear matmul t transpose as_strided view reshape _unsafe_view expand resolve_conj "
    "resolve_neg empty empty_like empty_strided permute squeeze unsqueeze slice select detach "
    "alias unbind split chunk narrow flatten unflatten view_as expand_as contiguous to item "
    "_local_scalar_dense dropout _reshape_alias lift_fresh result_type set_ resize_").split()}


class BadTrace(ValueError):
    """A file that cannot be read as a trace; the message is one line that says why."""


def parsed(path, number=str):
    """The JSON of a trace: a dict with a list of "traceEvents". Raises BadTrace. Floats stay the
    digits in the file, given to number: a double has too few for ns since 1970."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data[:2] == b"\x1f\x8b" or data and path.endswith(".gz"):
            import gzip
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    text = data.decode("utf-8-sig", "replace")
    del data
    try:
        data = json.loads(text, parse_float=number)
    except (ValueError, RecursionError) as error:
        cut = text[:1] in ("{", "[") and text.rstrip()[-1:] not in ("}", "]")
        what = "cut short" if cut else "not JSON" if text.strip() else "empty"
        raise BadTrace(f"{path}: the file is {what} ({error})") from None
    data = {"traceEvents": data} if type(data) is list else data
    if type(data) is not dict or type(data.get("traceEvents")) is not list:
        raise BadTrace(f"{path}: not a trace, it has no list of traceEvents")
    return data


def ns(value):
    """Whole ns in µs as parsed() leaves them, an int or the digits of a float; None if neither."""
    try:
        if type(value) is str and value[-4:-3] == ".":
            return int(value[:-4] + value[-3:])
        number = Decimal(value) if type(value) in (int, str) else None
        return round(number * 1000) if abs(number) < 10**18 else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def fault(e):
    """Turns an event's "ts" and "dur" into whole ns; returns what is wrong with it, if anything."""
    e["ts"], e["dur"] = ns(e.get("ts")), ns(e.get("dur"))
    if e["ts"] is None:
        return "events with a timestamp that is not a number, left out"
    if e["dur"] is None:
        return "events without a duration, left out"
    if not (type(e.get("name")) is type(e.get("cat")) is str and type(e.get("pid")) in (int, str)
            and type(e.get("tid")) in (int, str) and type(e.setdefault("args", {})) is dict):
        return "events without a name, category, process or thread, left out"
    if e["dur"] <= 0:
        odd = "negative duration, left out" if e["dur"] else "duration of 0, kept"
        return f"events with a {odd}"


def fits(ends, start, end):
    """Whether an event lies within those that are still open on its track, as Perfetto has it: one
    that ends after the event in which it starts is not shown. ends: of the open ones, kept up."""
    while ends and ends[-1] <= start:
        ends.pop()
    inside = not ends or end <= ends[-1]
    if inside:
        ends.append(end)
    return inside


def nest(track, faults):
    """Sorts a track's events, gives those of the CPU the "parent" that they ran in, and counts in
    faults those that Perfetto does not show."""
    track.sort(key=lambda e: (e["ts"], -e["dur"]))
    ends, parents = [], []
    for e in track:
        start = e["ts"]
        if not fits(ends, start, start + e["dur"]):
            faults[OVERLAP] += 1
        if e["cat"] in CPU:
            while parents and parents[-1]["ts"] + parents[-1]["dur"] <= start:
                parents.pop()
            e["parent"] = parents[-1] if parents else None
            parents.append(e)


def load(path, step=None):
    """Reads a trace into {"cpu", "gpu", "steps", "meta", "faults"}, or one step of it. Raises BadTrace.

    cpu: operators, annotations and launches by thread, each with the "parent" that it ran in.
    gpu: kernels and memory operations by start, each with the events "launch" and "op" that it
    comes from, the name of its "annotation", the index of its "step" and the "gap" in ns before it
    on its GPU; None where there is none. On a CPU, the operators that stand for kernels.
    These are the file's own events, but "ts" and "dur" are whole ns.
    steps: (name, start, end, thread), in ns. meta: the file's other keys. faults: {what: how many}.
    """
    collecting = gc.isenabled()
    gc.disable()  # so many new dicts set it off again and again, and there is no cycle to find
    try:
        meta, faults, tracks = parsed(path), Counter(), defaultdict(list)
        for e in meta.pop("traceEvents"):
            if type(e) is dict and e.get("ph") == "X" and e.get("cat") != "Trace":
                wrong = fault(e)
                if wrong:
                    faults[wrong] += 1
                if not wrong or wrong.endswith("kept"):
                    tracks[e["pid"], e["tid"]].append(e)
        for track in tracks.values():
            nest(track, faults)
        cpu = [e for track in tracks.values() for e in track if e["cat"] in CPU]
        gpu = [e for track in tracks.values() for e in track if e["cat"] in ("kernel", *MEMORY)]
        if not cpu and not gpu:
            raise BadTrace(f"{path}: not a PyTorch trace, it has no operator and no kernel")
        gpu = sorted(gpu or filter(works, cpu), key=lambda e: e["ts"])
        trace = {"cpu": cpu, "gpu": gpu, "meta": meta, "faults": faults}
        attach(trace)
        if step is not None:
            names = [name for name, *_ in trace["steps"]]
            if f"ProfilerStep#{step}" not in names:
                raise BadTrace(f"{path}: no ProfilerStep#{step}, but {', '.join(names)}")
            i = names.index(f"ProfilerStep#{step}")
            trace["steps"] = trace["steps"][i:i + 1]
            trace["gpu"] = [e for e in gpu if e["step"] == i]
            for e in trace["gpu"]:
                e["step"] = 0
        return trace
    finally:
        if collecting:
            gc.enable()


def ancestors(event):
    """The event and those that it ran in, innermost first."""
    while event:
        yield event
        event = event["parent"]


def works(event):
    """Whether a CPU event stands for a kernel: the outermost operator that does work, but for what
    torch.compile tries out."""
    chain = [e["cat"] == "cpu_op" and ("cpp_fused" in e["name"] or "compile_inner" in e["name"]
             or e["name"] not in NO_WORK and e["name"].startswith("aten::"))
             for e in ancestors(event)]
    return chain[0] and not any(chain[1:]) and "compile_inner" not in event["name"]


def annotates(event):
    """Whether an event is a record_function, other than a step or torch.compile's, with ##."""
    return (event["cat"] == "user_annotation"
            and not event["name"].startswith(("ProfilerStep", "##")))


def attach(trace):
    """Fills in load()'s steps and where GPU events come from: the correlation names the launch, the
    External id the operator; else that is the innermost operator around the launch."""
    # As text, for whatever else a damaged file has in place of a number.
    launches, ops = ({str(e["args"][key]): e for e in trace["cpu"]
                      if key in e["args"] and (e["cat"] == "cpu_op") == is_op}
                     for key, is_op in (("correlation", False), ("External id", True)))
    ends = {}
    for e in trace["gpu"]:
        on_cpu, gpu = e["cat"] == "cpu_op", e["pid"]
        launch = e if on_cpu else launches.get(str(e["args"].get("correlation")))
        op = ops.get(str(e["args"].get("External id")))
        op = op or next((a for a in ancestors(launch) if a["cat"] == "cpu_op"), None)
        note = next((a["name"] for a in ancestors(launch or op) if annotates(a)), None)
        gap = max(0, e["ts"] - ends[gpu]) if gpu in ends and not on_cpu else None
        e |= {"launch": launch, "op": op, "annotation": note, "gap": gap}
        ends[gpu] = max(ends.get(gpu, 0), span(e)[1])
    trace["steps"] = find_steps(trace)
    for e in trace["gpu"]:
        e["step"] = step_at(trace["steps"], (e["launch"] or e)["ts"])
    outside = sum(e["step"] is None for e in trace["gpu"])
    if outside:
        trace["faults"]["GPU events that were launched in no step, left out"] = outside


def step_at(steps, when):
    """The index of the step that a time in ns lies in, None if none."""
    i = bisect_right(steps, when, key=lambda step: step[1]) - 1
    return i if i >= 0 and when < steps[i][2] else None


def find_steps(trace):
    """The steps as (name, start, end, thread): each ProfilerStep; else each outermost annotation,
    if all have one name and launch most of the GPU's work; else the whole trace."""
    def steps(events):
        found = ((e["name"], e["ts"], e["ts"] + e["dur"], (e["pid"], e["tid"])) for e in events)
        return sorted(found, key=lambda step: step[1])
    cpu, gpu = trace["cpu"], trace["gpu"]
    profiled = steps(e for e in cpu if e["name"].startswith("ProfilerStep#"))
    if profiled:
        return profiled
    outer = steps(e for e in cpu if annotates(e)
                  and not any(map(annotates, ancestors(e["parent"]))))
    held = sum(step_at(outer, (e["launch"] or e)["ts"]) is not None for e in gpu)
    if len({name for name, *_ in outer}) == 1 and 2 * held > len(gpu):
        return outer
    threads = Counter((e["launch"]["pid"], e["launch"]["tid"]) for e in gpu if e["launch"])
    return [("whole trace", min(e["ts"] for e in cpu + gpu), max(span(e)[1] for e in cpu + gpu) + 1,
             max(threads, key=threads.get, default=None))]


def tensors(op):
    """An operator's inputs as (shape, elements that differ in memory, dtype, bytes per element), or
    None for one that is no tensor, has no dimension, or a shape or dtype that is not known here."""
    dims, types, strides = (op["args"].get(key) if type(op["args"].get(key)) is list else []
                            for key in ("Input Dims", "Input type", "Input Strides"))
    found = []
    for shape, dtype, steps in zip(dims, types, strides or dims):
        known = (type(shape) is list and shape and all(type(d) is int for d in shape)
                 and type(dtype) is str and dtype in DTYPES)
        distinct = known and prod(d for d, step in zip(shape, steps) if step != 0)
        found.append((shape, distinct, *DTYPES[dtype]) if known else None)
    return found


def gemm(op):
    """A GEMM's (FLOP, bytes, elements of its output), None each if its shapes do not tell: 2 FLOP
    per multiply-add, the factors and the addend read once, the output written once."""
    inputs = tensors(op) + [None] * 3
    a, b, c = (inputs[i] for i in GEMM[op["name"]])
    if not a or not b or len(b[0]) < 2:
        return None, None, None
    k, n = b[0][::-1][:2] if op["name"] in ("aten::linear", "FusedGeGLU") else b[0][-2:]
    if a[0][-1] != k:
        return None, None, None
    out = prod(a[0][:-1]) * n
    # 03_kernels_mlp.py's own kernel writes one value for each gate and up that it computes.
    written = out // 2 if op["name"] == "FusedGeGLU" else out
    return 2 * out * k, (a[1] + b[1] + (c[1] if c else 0) + written) * a[3], written


def pointwise(op):
    """The bytes that a pointwise operator moves, None if its inputs do not tell."""
    used = [t for t in tensors(op)[:POINTWISE[op["name"].rstrip("_")]] if t]
    if len({t[2] for t in used}) != 1:
        return None
    rank = max(len(shape) for shape, *_ in used)
    out = prod(map(max, [1] * rank, *([1] * (rank - len(shape)) + shape for shape, *_ in used)))
    return (sum(t[1] for t in used) + out) * used[0][3]


def fused(op, before):
    """The bytes that a pointwise kernel of Inductor moves, None if its arguments do not tell.

    They are the tensors that it reads and those that it writes; one that it overwrites in place
    appears once. That happens to the output of a GEMM that nobody needs any more: then as many of
    them wait as it has tensors of that size. before: the operators of the step's earlier kernels.
    """
    used = [t for t in tensors(op) if t]
    size = max((t[1] for t in used), default=0)
    largest, waiting = [t for t in used if t[1] == size], 0
    for other in before:
        waiting += other["name"] in GEMM and gemm(other)[2] == size
        waiting *= not other["name"].startswith("triton_")
    once = sum(elements * width for _, elements, _, width in used)
    if used and waiting == len(largest):
        return once + size * largest[0][3]
    return once if not before and len(largest) > 1 else None


def cost(event, peers, before):
    """(FLOP, bytes) of a GPU event, None where unknown. peers: its operator's kernels in the step;
    before: the operators of the step's earlier kernels."""
    op, size = event["op"] or {"name": "?"}, event["args"].get("bytes")
    if event["cat"] in MEMORY:  # a copy within the GPU both reads and writes its memory
        return None, size * (2 if "DtoD" in event["name"] else 1) if type(size) is int else None
    if op["name"] in GEMM:  # of several kernels the longest one multiplies
        return gemm(op)[:2] if event is max(peers, key=lambda e: e["dur"]) else (None, None)
    if len(peers) == 1 and op["name"].startswith("triton_poi_"):
        return None, fused(op, before)
    return None, pointwise(op) if len(peers) == 1 and op["name"].rstrip("_") in POINTWISE else None


def ridge(tflops, gbps):
    """FLOP per byte from which on arithmetic, not memory, is the roof."""
    return 1000 * tflops / gbps


def span(event):
    """(start, end) of an event in ns."""
    return event["ts"], event["ts"] + event["dur"]


def busy(spans):
    """How much time (start, end) intervals cover; where several overlap it counts once."""
    total, until = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def rows(trace):
    """What a step runs, by start: a dict for each kernel and memory operation, with its times in
    every step. It is the same one in two steps if name, operator, place, grid, shapes, and how many
    of those came before in the step, agree."""
    steps, found = defaultdict(list), {}
    for e in trace["gpu"]:
        if e["step"] is not None:
            steps[e["step"]].append(e)
    for events in steps.values():
        peers, seen, before = defaultdict(list), Counter(), []
        for e in events:
            if e["cat"] not in MEMORY:
                peers[id(e["op"])].append(e)
        for e in events:
            op, args = e["op"] or {"name": None, "args": {}}, e["args"]
            facts = {"name": e["name"], "kind": e["cat"], "op": op["name"], "device": e["pid"],
                     "stream": e["tid"], "grid": args.get("grid"), "block": args.get("block"),
                     "shapes": op["args"].get("Input Dims")}
            key = repr(facts)
            seen[key] += 1
            row = found.get((key, seen[key]))
            if not row:
                row = found[key, seen[key]] = facts | {
                    "dtype": next((t[2] for t in tensors(op) if t), None),
                    "launch": e["launch"] and e["launch"]["name"], "annotation": e["annotation"],
                    "cost": cost(e, peers[id(e["op"])], before), "events": [], "starts": []}
            row["events"].append(e)
            row["starts"].append(e["ts"] - events[0]["ts"])
            if e["op"] and e["cat"] == "kernel":
                before.append(e["op"])
    return sorted(found.values(), key=lambda row: median(row["starts"]))


def measured(row, steps, peaks):
    """A row of rows() with its times in ns, its rates, their shares of the GPU's peaks and its side
    of the roofline: "memory", "compute", "neither" if far below both roofs, None if unknown."""
    times, gaps = [e["dur"] for e in row["events"]], [e["gap"] for e in row["events"]]
    gaps = [gap for gap in gaps if gap is not None]
    time, (flop, moved) = median(times), row.pop("cost")
    flop_rate, byte_rate = flop and time and flop / time / 1000, moved and time and moved / time
    shares, side = [None, None], None
    if peaks and byte_rate and row["kind"] == "kernel":
        half, above = row["dtype"] in ("bf16", "fp16"), (flop or 0) / moved >= ridge(*peaks)
        shares = [flop_rate and flop_rate / peaks[0] if half else None, byte_rate / peaks[1]]
        side = "compute" if above else "memory"
        if flop and not half:  # another dtype has a lower ridge: above this one it is above its own
            side = "compute" if above else None
        elif max(shares[0] or 0, shares[1]) < REACH:
            side = "neither"
    del row["starts"], row["events"]
    return row | {
        "durations_ns": times, "median_ns": time, "min_ns": min(times), "max_ns": max(times),
        "gap_ns": median(gaps) if gaps else None,
        "per_step": len(times) / steps, "flop": flop, "bytes": moved, "tflops": flop_rate,
        "gbps": byte_rate, "peak_share": shares[0], "bandwidth_share": shares[1], "side": side}


def step_times(trace):
    """Per step, in ns: "recorded", how long it took; "waited", how long its thread waited while no
    GPU did anything for it, as for work from before the recording, 0 if under a tenth of the step;
    "taken", its time without that, on its thread or from the GPU's first to its last event, the
    longer one; "kernels", how long the busiest GPU ran kernels; "gpu", how long any GPU worked."""
    held, waits, found = defaultdict(list), defaultdict(list), []
    for e in trace["gpu"]:
        held[e["step"]].append(e)
    for e in trace["cpu"]:
        if e["cat"] in LAUNCH and ("Synchronize" in e["name"]
                                   or "Memcpy" in e["name"] and "Async" not in e["name"]):
            waits[step_at(trace["steps"], e["ts"]), (e["pid"], e["tid"])].append(span(e))
    for i, (name, start, end, thread) in enumerate(trace["steps"]):
        work, kernels, wait = [span(e) for e in held[i]], defaultdict(list), waits[i, thread]
        for e in held[i]:
            if e["cat"] == "kernel":
                kernels[e["pid"]].append(span(e))
        low, high = min(work, default=(0,))[0], max((end for _, end in work), default=0)
        gpu = busy(work)
        if 10 * (busy(work + wait) - gpu) < end - start:
            wait = []
        waited, within = busy(work + wait) - gpu, [(max(low, s), min(high, e)) for s, e in wait]
        found.append({"name": name, "recorded": end - start, "waited": waited, "gpu": gpu,
                      "taken": max(end - start - waited, high - low - busy(work + within) + gpu),
                      "kernels": max(map(busy, kernels.values()), default=0)})
    return found


def gpu_name(trace):
    """The name of the GPU at work, several joined by "and", None without one."""
    used, listed = {str(e["pid"]) for e in trace["gpu"] if e["cat"] != "cpu_op"}, trace["meta"]
    listed = listed.get("deviceProperties") if type(listed.get("deviceProperties")) is list else []
    names = {str(p.get("id")): str(p.get("name")) for p in listed if type(p) is dict}
    # ROCm numbers the GPUs of kernels otherwise than the properties.
    at_work = {names[gpu] for gpu in used if gpu in names} or set(names.values())
    return " and ".join(sorted(at_work)) or "unknown GPU" if used else None


def read(path, step=None):
    """What --json prints about a trace, times in ns, rates in TFLOP/s and GB/s. Raises BadTrace."""
    trace = load(path, step)
    times, gpu, lesson = step_times(trace), gpu_name(trace), trace["meta"].get("lesson")
    lesson = {key: float(value) if "." in str(value) and ns(value) is not None else value
              for key, value in (lesson if type(lesson) is dict else {}).items()}
    found = [measured(row, len(times), PEAKS.get(gpu)) for row in rows(trace)]
    mixed = 2 * sum(row["per_step"] < 1 for row in found) > len(found)
    _, start, end, _ = trace["steps"][-1]
    facts = {
        "file": path, "lesson": lesson, "gpu": gpu, "peaks": PEAKS.get(gpu), "steps": times,
        "mixed": mixed, "unprofiled_ns": None if mixed or step is not None else ns(
            str(lesson.get("step_us"))), "stacks": trace["meta"].get("with_stack"),
        **{f"{key}_ns": median([t[key] for t in times]) for key in times[0] if key != "name"},
        "kernels": [row for row in found if row["kind"] not in MEMORY],
        "memory": [row for row in found if row["kind"] in MEMORY],
        "operators": Counter(e["name"] for e in trace["cpu"] if e["cat"] not in LAUNCH
                             and start <= e["ts"] < end and "ProfilerStep" not in e["name"]),
        "faults": [f"{what}: {count}" for what, count in trace["faults"].items()]}
    return facts | {"verdict": verdict(facts)}


def verdict(facts):
    """What bounds a step: {"bound": "overhead", "memory", "compute" or None, "why": numbers}."""
    kernels, unprofiled = facts["kernels_ns"], facts["unprofiled_ns"]
    if not facts["gpu"]:
        return {"bound": None, "why": "none for a CPU: its times are noise, its structure holds."}
    if not kernels:
        return {"bound": None, "why": "cannot tell: no kernel runs in a step."}
    if facts["mixed"]:
        return {"bound": None, "why": "cannot tell: the steps differ. Look at one, with --step."}
    step = unprofiled or facts["taken_ns"]
    how = "takes {} µs without" if unprofiled else "took {} µs with"
    why = (f"A step {how.format(us(step))} the profiler, {step / kernels:.2f} times the "
           f"{us(kernels)} µs in which its kernels run.")
    if facts["waited_ns"] and not unprofiled:
        why += f" That leaves out {us(facts['waited_ns'])} µs of waiting for work not in the trace."
    if step > OVERHEAD * facts["gpu_ns"]:
        stacks = ", python stacks slow them a lot" if facts["stacks"] else ""
        doubt = f" The profiler slows launches{stacks}: time the step without it before you act."
        return {"bound": "overhead", "why": why + ("" if unprofiled else doubt)}
    if step > OVERHEAD * kernels:
        return {"bound": None, "why": f"cannot tell: {why} Copies or other GPUs fill the rest."}
    bound, sides = roofline(facts)
    return {"bound": bound, "why": f"{'' if bound else 'cannot tell: '}{why} {sides}"}


def roofline(facts):
    """The roofline side that takes most of the kernels' time, None if none does, and numbers."""
    if not facts["peaks"]:
        return None, f"The peaks of {facts['gpu']} are not in read.py's table."
    spent = Counter()
    for row in facts["kernels"]:
        spent[row["side"]] += row["median_ns"] * row["per_step"]
    words = {"compute": "above it (arithmetic)", "memory": "below it (memory)",
             "neither": f"below {REACH:.0%} of both peaks", None: "of an unknown side"}
    parts = ", ".join(f"{spent[side] / sum(spent.values()):.0%} {word}"
                      for side, word in words.items() if spent[side])
    bound = [side for side in ("memory", "compute") if 2 * spent[side] > sum(spent.values())]
    return bound[0] if bound else None, (
        f"By the ridge of {ridge(*facts['peaks']):.0f} FLOP per byte ("
        f"{facts['peaks'][0]:g} TFLOP/s over {facts['peaks'][1]} GB/s) their time is {parts}.")


def us(time):
    """ns as µs, with the three decimals that a trace has."""
    return "-" if time is None else f"{time / 1000:.3f}"


def short(text, width=400):
    """Text that is safe to print, cut in its middle if it is longer than width."""
    text, head = str(text), (width - 3) // 2
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= width else f"{text[:head]}...{text[head + 3 - width:]}"


def say(text, indent=2):
    """Prints a paragraph of at most 100 columns whose further lines are indented."""
    print(textwrap.fill(short(text, 4000), 100, subsequent_indent=" " * indent,
                        break_long_words=False, break_on_hyphens=False))


def figure(number):
    """A rate, a size or a percentage, to one decimal or, if it is small, two digits."""
    return f"{number:.1f}" if number >= 10 else f"{number:.2g}"


def shapes(dims):
    """Recorded shapes as text, without those of inputs that have none."""
    return " ".join(str(shape) for shape in dims if shape) if type(dims) is list else ""


def title(facts):
    """One line: what a file is."""
    lesson, where = facts["lesson"], facts["gpu"] or facts["lesson"].get("device") or "a CPU"
    if not lesson.get("script"):
        return f"{facts['file']}: a PyTorch trace of {where}"
    given = lesson.get("arguments")
    given = given.items() if type(given) is dict else ()
    given = ", ".join(f"{key} {' '.join(map(str, value if type(value) is list else [value]))}"
                      for key, value in given if type(value) in (int, str, list)
                      and key not in ("device", "variants", "flags", "sizes"))
    return (f"{facts['file']}: {lesson['script']}, {lesson.get('variant')}, on {where} with torch "
            f"{lesson.get('torch')} ({given})")


def speed(row):
    """How fast a row is and what share of the GPU's peak that is, as text, empty if unknown."""
    if row["tflops"]:
        text, share = f"{figure(row['tflops'])} TFLOP/s", row["peak_share"]
    elif row["gbps"]:
        size = f"{row['bytes'] / 1e6:.1f} MB" if row["bytes"] > 1e5 else f"{row['bytes']} bytes"
        text, share = f"{size} at {figure(row['gbps'])} GB/s", row["bandwidth_share"]
    else:
        return ""
    return text + (f", {figure(100 * share)}% of the peak" if share else "")


def details(row, told=None, gpus=1):
    """What launched a row, on what, how fast and where. told: an annotation already told."""
    note = "" if row["annotation"] in (None, told) else f" in {short(row['annotation'], 40)}"
    parts = [note, f"{shapes(row['shapes'])} {row['dtype'] or ''}"]
    if row["kind"] != "cpu_op":
        parts[0] = (row["op"] or row["launch"] or "no launch in the trace") + note
        gpu = f"GPU {row['device']} " if gpus > 1 else ""
        grid = f" grid {row['grid']} block {row['block']}" if row["grid"] else ""
        parts += [speed(row), f"{gpu}stream {row['stream']}{grid}"]
    if row["per_step"] != 1:
        parts.append(f"{row['per_step']:.3g} a step")
    return short("; ".join(part.strip() for part in parts if part.strip()))


def print_rows(what, found):
    """Prints a table: each row's times in µs and name, and what else is known on a second line."""
    notes, gpus = {row["annotation"] for row in found}, len({row["device"] for row in found})
    told = notes.pop() if len(notes) == 1 else None
    print()
    count = sum(row["per_step"] for row in found)
    say(f"{what}: {count:g} a step, by start{f', all in {told}' if told else ''} (µs)")
    print("   #     median        min        max        gap  name")
    for i, row in enumerate(found, 1):
        times = (f"{us(row[key]):>11}" for key in ("median_ns", "min_ns", "max_ns", "gap_ns"))
        print(f"{i:4}{''.join(times)}  {short(row['name'], 50)}")
        say(" " * 6 + details(row, told, gpus), 6)


def print_facts(facts):
    """Prints what read.py FILE prints."""
    steps, gpu = facts["steps"], facts["gpu"]
    say(title(facts))
    notes = facts["lesson"].get("notes")
    for note in notes if type(notes) is list else ():
        say(f"Noticed: {note}")
    listed = ", ".join(f"{step['name']} {us(step['recorded'])}" for step in steps[:8])
    say(f"{len(steps)} step{'s' * (len(steps) > 1)}: {listed}{', ...' * (len(steps) > 8)} µs")
    if facts["mixed"]:
        say("The steps differ, and below they are mixed: --step and a step's number shows one alone.")
    print_rows("Kernels" if gpu else "Operators that stand for kernels", facts["kernels"])
    if facts["memory"]:
        print_rows("Memory operations, which are no kernels", facts["memory"])
    print()
    if gpu:
        say(f"In a step kernels run for {us(facts['kernels_ns'])} µs and the GPU is busy for "
            f"{us(facts['gpu_ns'])} µs, time in which several run at once counted once.")
    for line in facts["faults"]:
        print(f"Note: {line}")
    bound = facts["verdict"]["bound"]
    say(f"Verdict: {f'{bound}-bound. ' if bound else ''}{facts['verdict']['why']}")


def chain(trace):
    """The last step's dispatch chain, a list of (depth, event): a CPU event is one deeper than the
    one that it ran in, a kernel or memory operation than its launch."""
    _, start, end, _ = trace["steps"][-1]
    launched, depths, found = defaultdict(list), {}, []
    for e in trace["gpu"]:
        if e["launch"] is not e:
            launched[id(e["launch"])].append(e)
    for e in trace["cpu"]:
        if start <= e["ts"] < end:
            depth = depths[id(e)] = depths.get(id(e["parent"]), -1) + 1
            found += [(depth, e)] + [(depth + 1, kernel) for kernel in launched[id(e)]]
    return found


def print_chain(trace):
    """Prints what read.py FILE --chain prints."""
    print(f"{'µs':>12}  the dispatch chain of {short(trace['steps'][-1][0], 60)}; => on the GPU")
    for depth, e in chain(trace):
        mark = "" if e["cat"] in CPU else "=> "
        line = f"{mark}{e['name']} {shapes(e['args'].get('Input Dims'))}".rstrip()
        print(f"{us(e['dur']):>12}  {'  ' * depth}{short(line, max(40, 86 - 2 * depth))}")


def matched(a, b, key):
    """Pairs the rows of a and b that have the same key, in order: (pairs, rest of a, rest of b)."""
    twins = defaultdict(list)
    for row in reversed(b):
        twins[key(row)].append(row)
    pairs = [(row, twins[key(row)].pop()) for row in a if twins[key(row)]]
    paired = {id(row) for pair in pairs for row in pair}
    return pairs, *([row for row in found if id(row) not in paired] for found in (a, b))


def compare(a, b):
    """What --json prints about two traces, from read() of each: pairs of rows that are the "same"
    or on "other_grid", rows "gone" and "new", the bytes of what changed, operators, times in ns."""
    every = [facts["kernels"] + facts["memory"] for facts in (a, b)]
    same, gone, new = matched(*every, lambda row: (row["name"], repr([row["grid"], row["block"]])))
    regrid, gone, new = matched(gone, new, lambda row: row["name"])
    time = "unprofiled_ns" if a["unprofiled_ns"] and b["unprofiled_ns"] else "taken_ns"
    # The same kernel on other shapes moves other bytes.
    other = [pair for pair in same + regrid if pair[0]["bytes"] != pair[1]["bytes"]
             or pair[0]["bytes"] is None and pair[0]["shapes"] != pair[1]["shapes"]]
    moved = [None if any(row["bytes"] is None for row in found) else
             sum(row["bytes"] * row["per_step"] for row in found)
             for found in (gone + [row for row, _ in other], new + [row for _, row in other])]
    return {
        "a": a["file"], "b": b["file"], "unprofiled": time == "unprofiled_ns",
        "step_ns": [a[time], b[time]], "kernels_ns": [a["kernels_ns"], b["kernels_ns"]],
        "same": same, "other_grid": regrid, "gone": gone, "new": new,
        "bytes_gone": moved[0], "bytes_new": moved[1],
        "operators_gone": {k: n for k, n in a["operators"].items() if k not in b["operators"]},
        "operators_new": {k: n for k, n in b["operators"].items() if k not in a["operators"]}}


def change(before, after):
    """Two times in ns as µs, and how much longer the second is."""
    return f"{us(before)} -> {us(after)} µs" + (f" ({after / before - 1:+.0%})" if before else "")


def print_comparison(a, b):
    """Prints what read.py A B prints."""
    found = compare(a, b)
    say(f"A  {title(a)}", 3)
    say(f"B  {title(b)}", 3)
    if a["mixed"] or b["mixed"]:
        say("The steps differ, and here they are mixed: --step and a step's number compares one.")
    print(f"\nA step {'without' if found['unprofiled'] else 'with'} the profiler: "
          f"{change(*found['step_ns'])}")
    if a["gpu"] or b["gpu"]:
        print(f"Its kernels: {change(*found['kernels_ns'])}")
    for key, words in ("same", "The same in both"), ("other_grid", "The same name, another grid"):
        print(f"\n{words}: {len(found[key])}")
        for row, twin in found[key]:
            times = change(row["median_ns"], twin["median_ns"])
            print(f"  {times:34}  {short(row['name'], 62)}")
            if key == "other_grid":
                grids = [f"grid {r['grid']} block {r['block']}" for r in (row, twin)]
                print(f"{'':38}{' -> '.join(grids)}")
    for key, words in ("gone", "Gone, only in A"), ("new", "New, only in B"):
        print(f"\n{words}: {len(found[key])}")
        for row in found[key]:
            print(f"{us(row['median_ns']):>13} µs  {short(row['name'], 80)}")
            say(" " * 18 + details(row), 18)
    gone, new = found["bytes_gone"], found["bytes_new"]
    print("\nMemory traffic of a step: " + (
        "cannot tell, the shapes of what is gone or new do not." if None in (gone, new) else
        f"{gone / 1e6:.1f} MB gone, {new / 1e6:.1f} MB new: {abs(gone - new) / 1e6:.1f} MB are "
        + ("moved on top." if gone < new else "not moved any more.")))
    for key, words in ("operators_gone", "gone"), ("operators_new", "new"):
        names = ", ".join(f"{short(name, 60)} x{count}" for name, count in found[key].items())
        say(f"Operators {words} on the CPU: {names or 'none'}")


def untangle(path, out):
    """Writes a copy of a trace of which Perfetto shows every event, and prints what it moved: what
    overlaps on its track goes to the first lane in which it fits, a thread of its own beside it,
    with the arrows that are tied to its start. Nothing is trimmed, no time changes."""
    trace = parsed(path, "\0".__add__)  # a mark: these are digits, to be written as they were read
    events = [e for e in trace["traceEvents"] if type(e) is dict]

    def time(e, key):
        return ns(e[key].strip("\0") if type(e.get(key)) is str else e.get(key)) or 0

    # The names of tracks first; then by time, an event before those in it, arrows after all.
    events.sort(key=lambda e: (e.get("ph") != "M", time(e, "ts"), e.get("ph") != "X",
                               -time(e, "dur")))
    used, names, tracks, place = {str(e.get("tid")) for e in events}, {}, {}, {}
    moved = defaultdict(Counter)
    for e in events:
        pid, tid, start, length = e.get("pid"), e.get("tid"), time(e, "ts"), time(e, "dur")
        track = str((pid, tid))
        if e.get("name") == "thread_name" and type(e.get("args")) is dict:
            names[track] = str(e["args"].get("name")).strip()
        elif e.get("ph") == "X" and length >= 0 and {type(pid), type(tid)} <= {int, str}:
            lanes = tracks.setdefault(track, {tid: []})
            # Perfetto sorts tracks by the numbers of their threads, so take the next free one.
            numbers = itertools.count(tid + 1 if type(tid) is int else 1)
            new = (n for n in numbers if str(n) not in used)
            lane = next(n for n in itertools.chain(lanes, new)
                        if fits(lanes.setdefault(n, []), start, start + length))
            e["tid"] = place[track, start] = lane
            used.add(str(lane))
            if lane != tid:
                name = f"{names.get(track, tid)}, lane {list(lanes).index(lane) + 1}"
                moved[pid, lane, name][str(e.get("cat"))] += 1
        elif e.get("ph") in ("s", "t", "f"):
            e["tid"] = place.get((track, start), tid)
    trace["traceEvents"] = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
        for pid, lane, name in moved] + events
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(re.sub(r'"\\u0000([^"]*)"', r"\1", json.dumps(trace)))
    except OSError as error:
        raise BadTrace(f"{out}: {error.strerror}") from None
    print(f"{short(out)}: no time changed; events moved: {sum(map(Counter.total, moved.values()))}")
    for (_, _, name), kinds in moved.items():
        print(f"  to {short(name)}:", short(", ".join(f"{n} {cat}" for cat, n in kinds.items())))


def serve(path):
    """Gives a file to Perfetto's page, and to nobody else, until it is loaded."""
    import http.server
    import shutil
    import urllib.parse
    import webbrowser
    ui, host = "https://ui.perfetto.dev", "127.0.0.1:9001"
    name = "/" + urllib.parse.quote(os.path.basename(path))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            # The Host tells a page that made its own name point here from one that asks for it.
            if (self.path != name or self.headers["Host"] not in (host, "localhost:9001")
                    or self.headers["Origin"] not in (None, ui)):
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", ui)
            self.send_header("Content-Type", "application/octet-stream")
            size = 0 if self.command == "OPTIONS" else os.path.getsize(path)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command == "GET":
                with open(path, "rb") as file:
                    shutil.copyfileobj(file, self.wfile)
                self.server.shutdown()

        do_HEAD = do_OPTIONS = do_GET

        def log_message(self, *_):
            pass

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 9001), Handler)
    except OSError as error:
        raise BadTrace(f"Perfetto reads only from {host}: {error.strerror}") from None
    link = f"{ui}/#!/?url=http://{host}{name}"
    with server:
        print(f"Open {link}\nPerfetto reads the file from here, in the browser; Ctrl-C stops this.")
        if os.environ.get("SSH_CONNECTION"):
            print("First, on the machine of the browser: ssh -L 9001:127.0.0.1:9001 HOST")
        else:
            webbrowser.open(link)
        sys.stdout.flush()
        server.serve_forever()


def main(argv=None):
    """Runs the command line. Returns the exit code: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Reads a PyTorch profiler trace, or compares two.")
    parser.add_argument("file", metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument("other", metavar="B", nargs="?", help="another one, to compare FILE with")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--chain", action="store_true", help="the last step's dispatch chain, a tree")
    how.add_argument("--json", action="store_true", help="the same facts for a program, in ns")
    how.add_argument("--open", action="store_true", help="open it in Perfetto, without uploading")
    how.add_argument("--perfetto", metavar="OUT",
                     help="write a copy of which Perfetto shows every event")
    parser.add_argument("--step", metavar="N", help="look at ProfilerStep#N alone")
    args = parser.parse_args(argv)
    if args.step is not None and (args.open or args.perfetto):
        parser.error("--step goes with the terminal: Perfetto shows all steps")
    if args.other and (args.chain or args.open or args.perfetto):
        parser.error("--chain, --open and --perfetto take one file")
    try:
        if args.perfetto:
            untangle(args.file, args.perfetto)
        elif args.open:
            if OVERLAP in load(args.file)["faults"]:
                print(f"Note: {OVERLAP}")
            serve(args.file)
        elif args.chain:
            print_chain(load(args.file, args.step))
        else:
            facts = [read(path, args.step) for path in (args.file, args.other) if path is not None]
            if args.json:
                print(json.dumps(compare(*facts) if len(facts) == 2 else facts[0], indent=1))
            else:
                print_comparison(*facts) if len(facts) == 2 else print_facts(*facts)
        return 0
    except BadTrace as error:
        print("read.py:", short(error), file=sys.stderr)
        return 1


if __name__ == "__main__":
    gc.disable()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)

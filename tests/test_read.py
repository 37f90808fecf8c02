"""traces/read.py, run as a reader runs it, on traces built here and on all that are committed.

Expected figures come from the raw events, by other means than read.py's: exact fractions of µs,
nested loops, no interval arithmetic.
"""
import gzip
import http.client
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from statistics import median

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
READ = ROOT / "traces" / "read.py"
COMMITTED = sorted(p for p in ROOT.glob("traces/*/*/*.json") if not p.name.startswith("bench_"))
START = 5_193_448_978_608_737  # ns, as far from 0 as real traces are
BF16, FP32 = "c10::BFloat16", "float"
GEMM = {"op": "aten::mm", "dims": [[8192, 768], [768, 3072]], "dtype": BF16}
GELU = {"op": "aten::gelu", "dims": [[64, 128, 3072], []], "dtype": BF16}
MUL = {"op": "aten::mul", "dims": [[64, 128, 3072]] * 2, "dtype": BF16}


def read(*args, code=0, env=None):
    """The output of read.py, which must end with the exit code."""
    done = subprocess.run([sys.executable, READ, *args], capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def facts(*args):
    return json.loads(read(*args, "--json"))


def names(rows, key="name"):
    return [row[key] for row in rows]


def event(cat, name, start, length, tid=1, pid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length,
            "args": {key.replace("_", " "): value for key, value in args.items()}}


def in_us(time):
    return f"{int(time) // 1000}.{int(time) % 1000:03}"


class Recorder:
    """Writes events as the profiler does: a CPU thread that launches, GPU streams that follow."""

    def __init__(self):
        self.events, self.now, self.number, self.free = [], START, 100, {}

    def annotate(self, name, body, thread=1):
        start = self.now
        self.now += 1_003
        body()
        self.now += 1_001
        self.events.append(event("user_annotation", name, start, self.now - start, thread))

    def launch(self, kernel, length, op=None, dims=(), dtype=BF16, thread=1, gpu=0, stream=7,
               late=5_000, grid=(132, 1, 1), cat="kernel", call="cudaLaunchKernel", work=1,
               more={}, strides=None):
        """An operator that launches `work` kernels with one call; more: args of the kernels."""
        self.number += 1
        start, known = self.now, {}
        if op:
            known = {"External_id": self.number}
            types = dtype if type(dtype) is list else [dtype if d else "" for d in dims]
            shown = {"Input_Strides": strides} if strides else {}
            self.events.append(event("cpu_op", op, start, 9_007, thread, Input_Dims=list(dims),
                                     Input_type=types, **known, **shown))
        api = "cuda_driver" if call == "cuLaunchKernelEx" else "cuda_runtime"
        self.events.append(event(api, call, start + 2_000, 3_001, thread, cbid=1,
                                 correlation=self.number, **known))
        at = max(start + 2_000 + late, self.free.get((gpu, stream), 0))
        for _ in range(work):
            known |= {"device": gpu, "stream": stream, "correlation": self.number}
            known |= {"grid": list(grid), "block": [384, 1, 1]} if cat == "kernel" else {}
            self.events.append(event(cat, kernel, at, length, stream, gpu, **known, **more))
            at += length + 11
        self.free[gpu, stream] = at
        self.now += 10_009

    def wait(self, length, call="cudaDeviceSynchronize"):
        self.number += 1
        self.events.append(event("cuda_runtime", call, self.now, length, correlation=self.number))
        self.now += length

    def write(self, path, gpu="NVIDIA H200", **top):
        """The file, with times as the profiler writes them: µs, three decimals."""
        known = {"deviceProperties": [{"id": 0, "name": gpu}] if gpu else []}
        text = json.dumps({"schemaVersion": 1, **known, "traceEvents": self.events, **top})
        text = re.sub(r'("ts"|"dur"): (-?\d+)', lambda m: f"{m[1]}: {in_us(m[2])}", text)
        (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text)
        return path


def mlp(path, kernels, steps=3, gpu="NVIDIA H200", late=5_000, **top):
    """A trace of `steps` steps that launch the kernels: (name, ns, keywords of launch)."""
    record = Recorder()
    for step in range(2, 2 + steps):
        def forward():
            for name, length, how in kernels:
                record.launch(name, length + 7 * step, **how, late=late)
        record.annotate(f"ProfilerStep#{step}", lambda: record.annotate("mlp_fwd", forward))
        record.now += 1_000_000
    lesson = {"lesson": {"script": "03_simple_mlp", "variant": "eager", "arguments": {"batch": 64},
                         "torch": "2.11.0", "notes": [], **top}} if top else {}
    return record.write(path, gpu, **lesson)


EAGER = [("Memset (Device)", 801, {"op": "aten::mm", "cat": "gpu_memset", "more": {"bytes": 16}}),
         ("nvjet_h_bz_NNT", 56_003, GEMM | {"call": "cuLaunchKernelEx"}),
         ("gelu_kernel", 29_001, GELU),
         ("nvjet_h_bz_NNT", 57_002, GEMM | {"call": "cuLaunchKernelEx"}),
         ("mul_kernel", 36_007, MUL),
         ("nvjet_h_bz_coop_NNT", 51_009, {"op": "aten::mm", "dims": [[8192, 3072], [3072, 768]]})]
COMPILED = [EAGER[0], EAGER[1], EAGER[3],
            ("triton_poi_fused__unsafe_view_gelu_mul_0", 37_013, {
                "op": "triton_poi_fused__unsafe_view_gelu_mul_0", "grid": (24576, 1, 1),
                "dims": [[64, 128, 3072], [8192, 3072], []]}), EAGER[5]]


def raw(path):
    """The events of a file that last, times as exact fractions of µs."""
    text = gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text("utf-8")
    data = json.loads(text, parse_float=Fraction)
    return [e for e in data["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]


def covered(events):
    """ns in which at least one event runs, by looking at every piece between two times."""
    times = sorted({t for e in events for t in (e["ts"], e["ts"] + e["dur"])})
    return sum(1000 * (b - a) for a, b in zip(times, times[1:])
               if any(e["ts"] <= a and b <= e["ts"] + e["dur"] for e in events))


def check_against_raw_events(path):
    """Every figure of --json that the raw events tell directly."""
    found, events = facts(path), raw(path)
    steps = sorted((e for e in events if e["name"].startswith("ProfilerStep")
                    and e["cat"] == "user_annotation"), key=lambda e: e["ts"])
    calls = {e["args"]["correlation"]: e["ts"] for e in events
             if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]}
    ops = {e["args"]["External id"]: e["name"] for e in events if e["cat"] == "cpu_op"}
    busy, rows = [], found["kernels"] + found["memory"]
    for i, step in enumerate(steps):
        inside = [e for e in events if e["cat"] in ("kernel", "gpu_memset", "gpu_memcpy")
                  and e["args"]["correlation"] in calls   # else it was launched before the recording
                  and 0 <= calls[e["args"]["correlation"]] - step["ts"] < step["dur"]]
        mine = sorted((e["name"], 1000 * e["dur"], str(ops.get(e["args"].get("External id"))))
                      for e in inside)
        if all(row["per_step"] == 1 for row in rows):
            assert mine == sorted((r["name"], r["durations_ns"][i], str(r["op"])) for r in rows)
        assert len(inside) <= sum(len(row["durations_ns"]) for row in rows)
        busy.append(max(covered([e for e in inside if e["cat"] == "kernel" and e["pid"] == gpu])
                        for gpu in {e["pid"] for e in inside}))
        assert found["steps"][i]["recorded"] == 1000 * step["dur"]
        assert found["steps"][i]["kernels"] == busy[-1]
        assert found["steps"][i]["gpu"] == covered(inside)
    assert found["kernels_ns"] == median(busy)
    for row in found["kernels"]:
        assert row["median_ns"] == median(row["durations_ns"])
    return found


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_times_operators_and_rates_are_those_of_the_events(tmp_path, suffix):
    path = mlp(tmp_path / f"eager{suffix}", EAGER)
    found = check_against_raw_events(path)
    assert names(found["kernels"]) == [name for name, *_ in EAGER[1:]]
    assert names(found["kernels"], "op") == [how["op"] for *_, how in EAGER[1:]]
    gate, gelu, _, mul, _ = found["kernels"]
    assert gate["durations_ns"] == [56_017, 56_024, 56_031] and gate["median_ns"] == 56_024
    assert {row["annotation"] for row in found["kernels"]} == {"mlp_fwd"}
    assert (gate["grid"], gate["stream"], gate["launch"]) == ([132, 1, 1], 7, "cuLaunchKernelEx")
    # 2 * 8192 * 768 * 3072 FLOP; both factors and the output; gelu reads one, mul two, of its size
    assert gate["flop"] == 38_654_705_664 and gate["bytes"] == 67_633_152
    assert gelu["bytes"] == 100_663_296 and mul["bytes"] == 150_994_944
    assert gate["tflops"] == pytest.approx(38_654_705_664 / 56_024 / 1000)
    assert gate["peak_share"] == pytest.approx(gate["tflops"] / 989.5)
    assert len(found["memory"]) == 1 and found["memory"][0]["name"] == "Memset (Device)"
    text = read(path)
    assert "Kernels: 5 a step, by start, all in mlp_fwd" in text
    assert "56.024     56.017     56.031" in text
    assert "aten::mm; [8192, 768] [768, 3072] bf16; 690.0 TFLOP/s, 69.7% of the peak" in text
    assert all(len(line) <= 100 for line in text.splitlines()[1:])


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(ROOT / "traces")))
def test_committed_traces_agree_with_their_events(path):
    found = check_against_raw_events(path)
    # A kernel that began before the recording may still run in it.
    overlap = [fault for fault in found["faults"] if "launched in no step" not in fault]
    two = "64_128-192-256_768_3072_compile", "1_16_768_3072_mode-reduce-overhead_compile"
    assert all("overlap on a track, kept" in fault for fault in overlap)
    assert len(overlap) == (path.stem in two)       # traces/README.md says which
    assert found["verdict"]["why"]
    assert found["lesson"]["script"] in read(path)


def test_no_digit_is_lost_of_a_time_since_1970(tmp_path):
    record = Recorder()
    record.now = 1_764_513_600_123_456_789  # ns: as µs with three decimals more than a double holds
    record.annotate("ProfilerStep#0", lambda: [record.launch("k", 1_001) for _ in range(2)])
    first, second = facts(record.write(tmp_path / "epoch.json"))["kernels"]
    assert second["gap_ns"] == 10_009 - 1_001


def test_kernels_belong_to_the_step_of_their_launch(tmp_path):
    """Late kernels, another thread, two streams and GPUs at once, one launch of many kernels."""
    record = Recorder()

    def step():
        record.launch("late", 400_000, "aten::mm", late=300_000)
        record.launch("beside", 400_000, "aten::mm", late=300_000, stream=9)
        record.launch("other gpu", 100_000, "aten::mm", gpu=1)
        record.launch("backward", 5_000, "MmBackward0", thread=2)
        record.launch("replayed", 1_000, call="cudaGraphLaunch", work=50, stream=11)
    for i in range(3):
        record.annotate(f"ProfilerStep#{i}", step)
    found = check_against_raw_events(record.write(tmp_path / "steps.json"))
    assert sum(row["per_step"] for row in found["kernels"]) == 54 and found["faults"] == []
    assert all(row["per_step"] == 1 for row in found["kernels"])
    rows = {row["name"]: row for row in found["kernels"]}
    assert rows["replayed"]["op"] is None and rows["replayed"]["launch"] == "cudaGraphLaunch"
    assert (rows["other gpu"]["device"], rows["beside"]["stream"]) == (1, 9)
    first = found["steps"][0]
    assert first["kernels"] < 500_000  # 400 µs twice, mostly at once


def test_without_profiler_steps_the_annotation_is_the_step_or_the_whole_trace(tmp_path):
    record = Recorder()
    for _ in range(4):
        record.annotate("train", lambda: record.launch("k", 1_000, "aten::add_"))
    assert names(facts(record.write(tmp_path / "a.json"))["steps"]) == ["train"] * 4
    record.annotate("eval", lambda: record.launch("k", 1_000))
    found = facts(record.write(tmp_path / "b.json"))
    assert names(found["steps"]) == ["whole trace"] and len(found["kernels"]) == 5
    inner = Recorder()
    inner.annotate("outer", lambda: inner.annotate("inner", lambda: inner.launch("k", 1_000)))
    assert names(facts(inner.write(tmp_path / "c.json"))["steps"]) == ["outer"]
    for _ in range(2):
        inner.launch("k", 1_000)
    assert names(facts(inner.write(tmp_path / "d.json"))["steps"]) == ["whole trace"]
    record.events = [e for e in record.events if e["cat"] in ("kernel", "cpu_op")]
    kernels = facts(record.write(tmp_path / "e.json"))["kernels"]
    assert names(kernels, "launch") == [None] * 5
    assert names(kernels, "op") == ["aten::add_"] * 4 + [None]


MM = 2 * 8192 * 768 * 3072
A, B, C = 8192 * 768, 768 * 3072, 8192 * 3072  # elements


@pytest.mark.parametrize("op, dims, how, flop, moved", [
    ("aten::linear", [[64, 128, 768], [3072, 768], [3072]], {}, MM, 2 * (A + B + C + 3072)),
    ("aten::addmm", [[3072], [8192, 768], [768, 3072]], {}, MM, 2 * (A + B + C + 3072)),
    ("aten::addmm", [[8192, 3072], [8192, 768], [768, 3072]], {}, MM, 2 * (A + B + 2 * C)),
    ("aten::bmm", [[4, 8192, 768], [4, 768, 3072]], {}, 4 * MM, 4 * 2 * (A + B + C)),
    ("aten::bmm", [[4, 8192, 768], [4, 768, 3072]],
     {"strides": [[A, 768, 1], [0, 3072, 1]]}, 4 * MM, 2 * (4 * A + B + 4 * C)),
    ("aten::mm", [[8192, 768], [768, 3072]], {"dtype": "float"}, MM, 4 * (A + B + C)),
    ("aten::mm", [[8192, 768], [3072, 768]], {}, None, None),
    ("aten::mm", [], {}, None, None),
    ("aten::add_", [[4096, 3072], [3072], []], {}, None, 2 * (2 * 4096 * 3072 + 3072)),
    ("aten::mul", [[4096, 1], [1, 3072]], {}, None, 2 * (4096 + 3072 + 4096 * 3072)),
    ("aten::mul", [[8, 8], [8, 8]], {"dtype": [BF16, "float"]}, None, None),
    ("LigerGELUMulFunction", [[64, 128, 3072]] * 2, {}, None, 3 * 2 * C),
    ("triton_poi_fused_add_0", [[8192, 3072]] * 3 + [[]], {}, None, 3 * 2 * C),
    ("triton_poi_fused_add_0", [[8192, 3072]], {}, None, None),
    ("aten::sum", [[8192, 3072], []], {}, None, None),
])
def test_flop_and_bytes(tmp_path, op, dims, how, flop, moved):
    path = mlp(tmp_path / "t.json", [("k", 50_000, {"op": op, "dims": dims} | how)])
    row, = facts(path)["kernels"]
    assert (row["flop"], row["bytes"]) == (flop, moved)


def test_an_operators_figures_go_to_the_kernel_that_did_the_work(tmp_path):
    record = Recorder()
    record.launch("Memcpy DtoD (Device -> Device)", 900, "aten::copy_", cat="gpu_memcpy",
                  more={"bytes": 1_000})
    record.launch("gemm", 50_000, **GEMM)
    reduce = record.events[-1] | {"name": "splitKreduce", "ts": record.free[0, 7], "dur": 1_000}
    record.events.append(reduce)
    found = facts(record.write(tmp_path / "t.json"))
    assert names(found["kernels"], "flop") == [MM, None]
    assert names(found["memory"], "bytes") == [2_000]  # within the GPU: read and written


BIG = [("gemm", 170_000, {"op": "aten::mm", "dims": [[4096, 4096]] * 2}),
       ("add", 23_000, {"op": "aten::add", "dims": [[4096, 4096]] * 2 + [[]]})]
SMALL = [("gemm", 2_000, {"op": "aten::mm", "dims": [[64, 64]] * 2}),
         ("add", 1_500, {"op": "aten::add", "dims": [[64, 64]] * 2 + [[]]})]
FP32 = [("gemm", 900_000, {"op": "aten::mm", "dims": [[1024, 1024]] * 2, "dtype": "float"})]


@pytest.mark.parametrize("kernels, lesson, gpu, bound, words", [
    (BIG, {}, "NVIDIA H200", "compute", "206 FLOP per byte"),
    (SMALL, {}, "NVIDIA H200", "overhead", "time the step without it before you act"),
    (BIG, {"step_us": 199.5}, "NVIDIA H200", "compute", "199.500 µs without the profiler, 1.03"),
    (BIG, {"step_us": 400.0}, "NVIDIA H200", "overhead", "takes 400.000 µs without"),
    (SMALL, {"step_us": 4}, "NVIDIA H200", None, "100% below 25% of both peaks"),
    ([EAGER[2], EAGER[4]], {}, "NVIDIA H200", "memory", "100% below it (memory)"),
    ([EAGER[1], EAGER[3]], {}, "NVIDIA H200", "compute", "100% above it (arithmetic)"),
    (BIG, {}, "NVIDIA H200 MIG 1g.18gb", None, "not in read.py's table"),
    ([("attention", 500_000, {"op": "aten::_flash_attention_forward", "dims": [[8, 64, 64]]})], {},
     "NVIDIA H200", None, "100% of an unknown side"),
    (FP32, {}, "NVIDIA H200", None, "100% of an unknown side"),
    ([("Memcpy HtoD", 900_000, {"cat": "gpu_memcpy"}), *SMALL], {}, "NVIDIA H200", None, "Copies"),
    ([EAGER[0]], {}, "NVIDIA H200", None, "no kernel"),
], ids=lambda value: None if isinstance(value, (list, dict)) else str(value)[:20])
def test_verdict(tmp_path, kernels, lesson, gpu, bound, words):
    path = mlp(tmp_path / "t.json", kernels, gpu=gpu, **lesson)
    assert facts(path)["verdict"]["bound"] == bound
    text = re.sub(r"\s+", " ", read(path).split("Verdict: ")[1])
    assert words in text and text.startswith(f"{bound}-bound. " if bound else "cannot tell: ")


def test_waiting_for_work_that_is_not_in_the_trace_is_no_overhead(tmp_path):
    record = Recorder()

    def step():
        record.wait(400_000_000, "hipMemcpyWithStream")
        record.launch("graph", 100_000, call="hipGraphLaunch", work=20, gpu=9)  # ROCm's number of 0
        record.wait(2_100_000)
    record.annotate("decode", step)
    found = facts(record.write(tmp_path / "t.json", gpu="AMD Instinct MI300X"))
    assert found["gpu"] == "AMD Instinct MI300X" and found["peaks"]
    assert found["recorded_ns"] > 400_000_000 and found["waited_ns"] > 399_000_000
    assert found["taken_ns"] < 1.5 * found["kernels_ns"] and found["verdict"]["bound"] is None


def test_two_traces(tmp_path):
    a = mlp(tmp_path / "eager.json", EAGER, step_us=241.3)
    b = mlp(tmp_path / "compile.json", COMPILED, step_us=219.1)
    found = facts(a, b)
    assert names(row for row, _ in found["same"]) == [EAGER[i][0] for i in (1, 3, 5, 0)]
    assert names(found["gone"], "op") == ["aten::gelu", "aten::mul"]
    assert names(found["new"]) == [COMPILED[3][0]]
    # gelu and mul move 2 + 3 times [8192, 3072] bf16, the kernel that stands for both moves 3
    assert found["bytes_gone"] - found["bytes_new"] == 2 * 8192 * 3072 * 2
    text = read(a, b)
    assert "241.300 -> 219.100 µs (-9%)" in text and "100.7 MB are not moved any more" in text
    assert "Operators gone on the CPU: aten::gelu x1, aten::mul x1" in text
    full = mlp(tmp_path / "full.json", [EAGER[4]])
    smaller = MUL | {"dims": [[32, 128, 3072]] * 2}
    half = mlp(tmp_path / "half.json", [("mul_kernel", 18_000, smaller)])
    found = facts(full, half)
    assert len(found["same"]) == 1
    assert found["bytes_gone"] == 2 * found["bytes_new"] == 150_994_944
    unknown = mlp(tmp_path / "unknown.json", [*EAGER, ("sum", 9_000, {"op": "aten::sum"})])
    assert "Memory traffic of a step: cannot tell" in read(a, unknown)
    name, length, how = COMPILED[3]
    kernels = [*COMPILED[:3], (name, length, how | {"grid": (49152, 1, 1)}), COMPILED[4]]
    text = read(b, mlp(tmp_path / "grid.json", kernels))
    assert "The same name, another grid: 1" in text
    assert "grid [24576, 1, 1] block [384, 1, 1] -> grid [49152, 1, 1] block [384, 1, 1]" in text


def test_one_step_alone():
    """Where steps differ: one has the kernels of its own and no figure that is of all."""
    path = ROOT / "traces/h200/03_kernels_mlp/64_128-192-256_768_3072_fused.json"
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    mixed = "The steps differ", "Verdict: cannot tell: the steps differ."
    assert all(text in read(path) and text not in read(path, "--step", "3") for text in mixed)
    for i, rows in enumerate((128, 192, 256)):
        found = facts(path, "--step", str(i + 2))
        assert [step["name"] for step in found["steps"]] == [f"ProfilerStep#{i + 2}"]
        kernels = sorted((e for e in events if e["cat"] == "kernel"), key=lambda e: e["ts"])[2 * i:2 * i + 2]
        assert [row["median_ns"] for row in found["kernels"]] == [round(e["dur"] * 1000) for e in kernels]
        assert [row["per_step"] for row in found["kernels"]] == [1, 1]
        assert found["kernels"][1]["shapes"][0] == [64 * rows, 3072]
        assert found["unprofiled_ns"] is None
        assert f"ProfilerStep#{i + 2}" in read(path, "--step", str(i + 2), "--chain")
    names = "ProfilerStep#2, ProfilerStep#3, ProfilerStep#4"
    assert read(path, "--step", "9", code=1) == f"read.py: {path}: no ProfilerStep#9, but {names}\n"
    assert "--step goes with the terminal" in read(path, "--step", "3", "--open", code=2)
    assert "no ProfilerStep#," in read(path, "--step=", code=1)
    hint = "The steps differ, and here they are mixed"
    assert hint in read(path, path) and hint not in read(path, path, "--step", "4")
    assert "A step with the profiler" in read(path, path)       # the other figure is of one size
    both = facts(path, path, "--step", "4")
    assert len(both["same"]) == 3 and not both["gone"] and not both["new"]


def test_chain(tmp_path):
    lines = read(mlp(tmp_path / "t.json", EAGER), "--chain").splitlines()
    start = next(i for i, line in enumerate(lines) if "aten::gelu" in line)
    assert [line[12:] for line in lines[1:3] + lines[start:start + 3]] == [
        "  ProfilerStep#4",
        "    mlp_fwd",
        "      aten::gelu [64, 128, 3072]",
        "        cudaLaunchKernel",
        "          => gelu_kernel"]
    assert lines[start + 2].split()[0] == "29.029"


def test_a_cpu_has_operators_and_no_verdict(tmp_path):
    record = Recorder()

    def op(name, length, *children):
        start = record.now
        for child in children:
            op(*child)
        record.now = max(record.now, start + length)
        record.number += 1
        record.events.append(event("cpu_op", name, start, record.now - start,
                                   External_id=record.number))
    view = ("aten::t", 900, ("aten::transpose", 500, ("aten::as_strided", 100)))
    for i in range(3):
        record.annotate(f"ProfilerStep#{i}", lambda: [
            op("aten::linear", 50_000, view, ("aten::addmm", 40_000, ("aten::copy_", 9_000))),
            op("graph_0_cpp_fused_gelu_0", 7_000), op("aten::matmul", 9_000, ("aten::mm", 8_000))])
    path = record.write(tmp_path / "cpu.json", gpu=None)
    found = facts(path)
    assert names(found["kernels"]) == ["aten::addmm", "graph_0_cpp_fused_gelu_0", "aten::mm"]
    assert found["kernels"][0]["durations_ns"] == [40_000] * 3 and found["gpu"] is None
    assert "Verdict: none for a CPU" in read(path)


def test_odd_events_are_counted_and_the_others_read(tmp_path):
    record = Recorder()
    record.annotate("ProfilerStep#0", lambda: record.launch("k", 5_000, "aten::add"))
    bad = [event("kernel", "k", START, 1_000, 7, 0) for _ in range(5)]
    bad[0]["ts"], bad[1]["dur"] = "soon", -1_000
    del bad[2]["dur"]
    bad[3] |= {"dur": 0}
    bad[4]["ts"] = record.events[-2]["ts"] + 1_000
    bad[4]["dur"] = 5_000  # starts in the kernel and ends after it
    record.events += [*bad, None, {"ph": "X"}, {"ph": "X", "name": [], "ts": START, "dur": 1}]
    path = record.write(tmp_path / "odd.json")
    text = read(path)
    for what, count in (("without a duration, left out", 1), ("with a duration of 0, kept", 1),
                        ("with a negative duration, left out", 1),
                        ("with a timestamp that is not a number, left out", 2),
                        ("without a name, category, process or thread, left out", 1),
                        ("that overlap on a track, kept (Perfetto drops them: --perfetto OUT "
                         "moves them)", 1)):
        assert f"Note: events {what}: {count}\n" in text
    text = path.read_text().replace('"ProfilerStep#0"', '"a\\u0001\\u001b[31m\\u001b[0m\\ud800"')
    path.write_text(text)
    assert "\x1b" not in read(path) and "a??[31m?[0m?" in read(path)


@pytest.mark.parametrize("name, content, words", [
    ("missing.json", None, "No such file"), ("", None, "irectory"), ("folder", "folder", "directory"),
    ("empty.json", b"", "is empty"), ("empty.json.gz", b"", "is empty"),
    ("cut.json", b'{"traceEvents": [{"ph": "X", "na', "cut short"),
    ("control.json", b'{"traceEvents": [{"name": "a\x01"}]}', "Invalid control character"),
    ("text.json", b"hello", "not JSON"), ("binary.json", bytes(range(256)) * 9, "not JSON"),
    ("deep.json", b"[" * 99_999 + b"]" * 99_999, "recursion"),
    ("other.json", b'{"a": 1}', "not a trace"), ("five.json", b"5", "not a trace"),
    ("none.json", b'{"traceEvents": []}', "not a PyTorch trace"),
    ("plain.json.gz", b'{"traceEvents": []}', "ot a gzipped file"),
    ("cut.json.gz", gzip.compress(b"{}" * 99)[:-9], "nd-of-stream"),
    ("noise.json.gz", gzip.compress(b"{}" * 99)[:15] + b"\xff" * 40, "noise.json.gz: "),
], ids=lambda value: str(value)[:14])
@pytest.mark.parametrize("how", [[], ["--json"], ["--chain"], ["--open"]], ids=str)
def test_a_bad_file_is_one_line_and_exit_code_1(tmp_path, name, content, words, how):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    line = read(path, *how, code=1)
    assert line.startswith("read.py: ") and line.count("\n") == 1 and words in line and name in line


def test_arguments_and_a_closed_pipe(tmp_path):
    path = mlp(tmp_path / "t.json", EAGER * 400)
    for args in ([], [path, "--nothing"], [path, path, "--chain"], [path, "--json", "--open"]):
        assert "usage:" in read(*args, code=2)
    shell = f"{sys.executable} {READ} {path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def digits(path):
    """The events of a file, numbers as they are written there, without their threads."""
    events = json.loads(path.read_text(), parse_float=str)["traceEvents"]
    return sorted(repr({k: v for k, v in e.items() if k != "tid"}) for e in events)


def test_a_copy_for_perfetto_has_every_event_and_no_overlap(tmp_path):
    """Slices at random on three streams, each with the arrow that ends at its start."""
    chance, record, start = random.Random(0), Recorder(), 1_790_857_026_000_000_123
    record.launch("k", 5_000, "aten::add")
    for i in range(300):
        kernel = event("kernel", f"k{i}", start + chance.randrange(1_000_000),
                       chance.randrange(1, 9_999), chance.choice((7, 8, "late")), 0,
                       correlation=i, share=0.1 + i)
        arrow = {"ph": "f", "bp": "e", "id": i, "cat": "ac2g", "name": "ac2g"}
        record.events += [kernel, arrow | {k: kernel[k] for k in ("pid", "tid", "ts")}]
    record.events += [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": start,
                       "args": {"name": "stream 7 "}}]
    path, copy = record.write(tmp_path / "t.json", note="1.50"), tmp_path / "copy.json"
    text = read(path, "--perfetto", copy)
    events = [json.loads(file.read_text(), parse_float=Fraction) for file in (path, copy)]
    assert [{k: v for k, v in trace.items() if k != "traceEvents"} for trace in events][0] == {
        k: v for k, v in events[1].items() if k != "traceEvents"}
    old, new = (trace["traceEvents"] for trace in events)
    named = [e for e in new if e["ph"] == "M" and e["tid"] not in (7, 8, "late")]
    assert sorted(set(digits(copy)) - set(digits(path))) == sorted({repr(
        {k: v for k, v in e.items() if k != "tid"}) for e in named})
    assert set(digits(path)) <= set(digits(copy)) and len(new) == len(old) + len(named)
    assert new[:len(named) + 1] == [e for e in new if e["ph"] == "M"]
    slices = [e for e in new if e["ph"] == "X"]
    for a in slices:
        for b in slices:
            if (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
                end = a["ts"] + a["dur"]
                assert not a["ts"] < b["ts"] < end < b["ts"] + b["dur"]
    threads = {e["args"]["correlation"]: e["tid"] for e in slices if e["cat"] == "kernel"}
    assert all(e["tid"] == threads[e["id"]] for e in new if e["ph"] == "f")
    before = {e["name"]: e["tid"] for e in old if e["ph"] == "X"}
    moved = [e for e in slices if e["tid"] != before[e["name"]]]
    assert f"{copy}: no time changed; events moved: {len(moved)}\n" in text
    assert {e["tid"] for e in moved} == {e["tid"] for e in named}
    assert 9 <= min(e["tid"] for e in moved if before[e["name"]] == 7)
    lane = next(e["tid"] for e in named if e["args"]["name"] == "stream 7, lane 2")
    assert f"  to stream 7, lane 2: {sum(e['tid'] == lane for e in moved)} kernel\n" in text


def test_a_copy_for_perfetto_is_a_copy(tmp_path):
    path, copy = mlp(tmp_path / "t.json", EAGER), tmp_path / "copy.json"
    before = path.read_bytes()
    assert "events moved: 0\n" in read(path, "--perfetto", copy)
    assert digits(copy) == digits(path)
    for out, words in ((path, "File exists"), (tmp_path / "no/t.json", "No such file")):
        line = read(path, "--perfetto", out, code=1)
        assert line.startswith(f"read.py: {out}: {words}") and line.count("\n") == 1
    assert path.read_bytes() == before
    assert "usage:" in read(path, path, "--perfetto", tmp_path / "b.json", code=2)


def test_open_says_what_perfetto_drops(tmp_path):
    record = Recorder()
    record.annotate("ProfilerStep#0", lambda: record.launch("k", 5_000, "aten::add"))
    record.events.append(event("kernel", "k", record.events[-2]["ts"] + 1_000, 5_000, 7, 0))
    process, line = serving(record.write(tmp_path / "t.json"))
    try:
        assert line.startswith("Note: events that overlap") and "--perfetto OUT" in line
        assert process.stdout.readline().startswith("Open ")
    finally:
        process.kill()


def serving(path, **env):
    """read.py --open on a file, as its own process, once it prints its link."""
    process = subprocess.Popen([sys.executable, READ, path, "--open"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"BROWSER": "true"} | env,
                               # A shell's background jobs ignore Ctrl-C, and so would this.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return process, process.stdout.readline()


def ask(method, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", 9001, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers["Access-Control-Allow-Origin"], body


def test_open_serves_one_file_to_perfetto_once(tmp_path):
    path = mlp(tmp_path / "a trace.json.gz", EAGER)
    process, line = serving(path, SSH_CONNECTION="10.0.0.1 5 10.0.0.2 22")
    try:
        ui, name = "https://ui.perfetto.dev", "/a%20trace.json.gz"
        assert line.strip() == f"Open {ui}/#!/?url=http://127.0.0.1:9001{name}"
        assert ask("GET", "/", Origin=ui)[0] == ask("GET", "/../" + name)[0] == 404
        assert ask("GET", name, Host="evil.example:9001")[0] == 404
        assert ask("GET", name, Origin="https://evil.example")[0] == 404
        assert ask("POST", name, Origin=ui)[0] == 501
        assert ask("OPTIONS", name, Origin=ui)[:2] == ask("HEAD", name, Origin=ui)[:2] == (200, ui)
        taken = read(path, "--open", code=1)
        assert taken.startswith("read.py: ") and taken.count("\n") == 1 and "9001" in taken
        assert process.poll() is None
        assert ask("GET", name, Origin=ui) == (200, ui, path.read_bytes())
        assert process.wait(timeout=20) == 0
        assert "ssh -L 9001:127.0.0.1:9001 HOST" in process.stdout.read()
    finally:
        process.kill()


def test_open_stops_at_ctrl_c(tmp_path):
    process, _ = serving(mlp(tmp_path / "t.json", EAGER))
    time.sleep(0.5)
    process.send_signal(2)
    assert process.wait(timeout=20) == 130 and "Traceback" not in process.stderr.read()


def test_importing_it_does_nothing(tmp_path):
    code = ("import sys, read; print(read.read(sys.argv[1])['gpu'],"
            " sorted({'gzip', 'http', 'webbrowser'} & set(sys.modules)))")
    path = mlp(tmp_path / "t.json", EAGER)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True,
                          check=True, cwd=READ.parent)
    assert done.stdout == "NVIDIA H200 []\n"

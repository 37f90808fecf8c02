"""The documents and the reference traces: up to date, whole, and free of anything private."""
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "traces"), str(ROOT / "tests")]
import read                                 # noqa: E402
import record                               # noqa: E402
from test_scripts import check_private, load, spans    # noqa: E402

REFERENCE = record.REFERENCE
REFERENCES = sorted((ROOT / "traces").glob("*/0*/*.json"))


@pytest.mark.parametrize("path", record.DOCS)
def test_documents_are_up_to_date(path):
    assert (ROOT / path).read_text("utf-8") == record.docs(path), "run python traces/record.py --docs"


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_reference_trace(path):
    """Whole, private, as the guess says, and with the durations that the committed output shows."""
    trace = json.loads(path.read_text("utf-8"))
    check_private(trace)
    script, variant = path.parent.name, path.stem.split("_")[-1]
    lesson = trace["lesson"]
    assert (lesson["script"], lesson["variant"]) == (script, variant)
    assert trace["traceName"] == f"traces/{script}/{path.name}"
    given = lesson["arguments"]
    wait, warmup, active = given.get("schedule", [1, 1, 3])
    names = [e["name"] for e in spans(trace) if e["name"].startswith("ProfilerStep")
             and e["cat"] == "user_annotation"]
    assert names == [f"ProfilerStep#{wait + warmup + i}" for i in range(active)]
    module, turns = load(script), given.get("sizes", 1) > 1
    steps, lost = module.launched(trace, "cuda")
    assert lost == 0
    assert len(lesson["notes"]) <= turns
    guessed = module.guess(variant, given.get("flags", []))
    for step in steps[-1:] if turns else steps:
        seen = [op for op, events in step if any(map(module.is_kernel, events))]
        assert len(seen) == len(guessed) and all(map(module.fnmatch.fnmatchcase, seen, guessed))
        assert len(step) == len(seen) + ("aten::copy_" in [op for op, _ in step])   # baddbmm's, of b
    assert path.with_suffix(".txt").is_file()
    assert f"  {trace['traceName']}\n" in (path.parent / "output.txt").read_text("utf-8")


@pytest.mark.parametrize("script", ["01_matmul_add", "02_linear", "03_simple_mlp", "03_kernels_mlp"])
def test_output_is_that_of_the_traces(script):
    """Each command of RUNS is there once, and its output has the traces' operators and durations."""
    runs = (REFERENCE / script / "output.txt").read_text("utf-8").split("$ python ")[1:]
    assert [run.split("\n")[0] for run in runs] == [run for run in record.RUNS if run.startswith(script)]
    traces, module = [], load(script)
    for run in runs:
        sections = re.findall(r"\n\n(\w+)\n(.*?\n  The guess holds\.)", run, re.S)
        names = re.findall(rf"^  traces/{script}/(\S+)\.json$", run, re.M)
        traces += names
        for (variant, section), name in zip(sections, names, strict=True):
            assert name.endswith(f"_{variant}")
            trace = json.loads((REFERENCE / script / f"{name}.json").read_text("utf-8"))
            steps, _ = module.launched(trace, "cuda")
            steps = steps[-1:] if trace["lesson"]["arguments"].get("sizes", 1) > 1 else steps
            took = zip(*([e["dur"] for _, events in step for e in events] for step in steps))
            shown = re.findall(r"^  .{45,60}? +(\d+\.\d\d)  .*(.{8})$", section, re.M)
            assert shown == [(f"{median(us):.2f}", e["name"][-8:]) for us, e in zip(
                took, [e for _, events in steps[-1] for e in events])]
    assert sorted(traces) == sorted(path.stem for path in (REFERENCE / script).glob("*.json"))


def test_claims_that_do_not_hold_on_the_h200():
    look = record.looker(record.REFERENCE)
    assert [claim for claim, _, check in record.CLAIMS if not check(look)[0]] == [
        "... since it is cold: a warm run has none",
        "aten::mm asks for the occupancy before it launches",
        "... and that GEMM is the kernel of eager",
        "one kernel's duration varies from step to step",
        "max-autotune makes 01 at 4096 one kernel",
        "each new shape costs a compile",
    ]


# Facts to change where no trace here shows the other outcome.
CHANGED = {
    "Liger: one kernel by hand, no Dynamo": lambda facts: {"operators": {"TorchDynamo Cache Lookup": 1}},
    "schedule 0 0 3 shows an Activity Buffer Request": lambda facts: {
        "text": json.dumps({"traceEvents": [{"name": "Activity Buffer Request", "dur": 900}]})},
    "one kernel's duration varies from step to step": lambda facts: {
        "kernels": [row | {"max_ns": 2 * row["min_ns"]} for row in facts["kernels"]]},
}


@pytest.mark.parametrize("claim, check", [(claim, check) for claim, _, check in record.CLAIMS])
def test_a_claim_can_hold_and_fail(claim, check):
    """Shown other traces in place of its own, it holds for some and not for others."""
    look = record.looker(record.REFERENCE)
    outcomes = {check(look)[0]}
    if claim in CHANGED:
        outcomes.add(check(lambda name: look(name) | CHANGED[claim](look(name)))[0])
    for path in record.REFERENCE.glob("0*/*.json"):     # other GPUs' traces may lie beside these
        other = str(path.relative_to(record.REFERENCE).with_suffix(""))
        try:
            outcomes.add(check(lambda name: look(other))[0])
        except (IndexError, KeyError, ValueError, TypeError, StopIteration):    # it lacks what is asked
            pass
    assert outcomes == {True, False}


@pytest.mark.parametrize("gpu, name", [
    ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla T4", "t4"),
    ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GeForce RTX 4090", "4090")])
def test_folder_of_a_gpu(gpu, name):
    assert record.short_name(gpu) == name


def test_recording_needs_a_gpu_and_a_whole_run(tmp_path, monkeypatch):
    done = subprocess.run([sys.executable, ROOT / "traces/record.py"], capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and "finds no GPU" in done.stderr and "Trace" not in done.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(record, "RUNS", ["02_linear.py --batch 8 --eager", "02_linear.py --liger"])
    with pytest.raises(SystemExit, match="--liger failed, nothing was replaced"):
        record.record(tmp_path)
    assert (tmp_path / "traces/02_linear/output.txt").read_text("utf-8").startswith(
        "$ python 02_linear.py --batch 8 --eager\n02_linear in ")


def test_readme_snippet(tmp_path):
    """What the README says to copy is enough, and prints what the README says."""
    text = (ROOT / "README.md").read_text("utf-8")
    [snippet] = re.findall(r"```python\n(.*?)```", text, re.S)
    script = (ROOT / "02_linear.py").read_text("utf-8")
    copied = [ast.get_source_segment(script, node) for node in ast.parse(script).body
              if isinstance(node, (ast.Import, ast.ImportFrom))
              or getattr(node, "name", "") in ("profile", "time_step", "launched")
              or isinstance(node, ast.Assign) and node.targets[0].id == "IDLE"]
    quiet = script[script.index("@contextlib.contextmanager"):script.index("def profile(")]
    (tmp_path / "mine.py").write_text("\n".join([*copied, quiet, snippet]), "utf-8")
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and re.fullmatch(
        r"\['aten::mm', 'aten::relu'\]\n\d+ µs without the profiler\n", done.stdout)
    assert read.read(str(tmp_path / "mine.json"))["kernels"]


def test_compiling_a_single_linear_costs_more_than_it_saves():
    look = record.looker(record.REFERENCE)
    eager, compiled = (look(f"02_linear/1024_32_64_{v}")["unprofiled_ns"] for v in ("eager", "compile"))
    assert compiled > eager


def test_what_the_readme_says_of_the_modes():
    look = record.looker(record.REFERENCE)
    step = lambda name: look(name)["unprofiled_ns"]
    mode = lambda name, mode: step(f"{name}_mode-{mode}_compile")
    few, many = "03_simple_mlp/1_16_768_3072", "03_simple_mlp/64_128_768_3072"
    busy = lambda name: look(name)["gpu_ns"]
    graph = "mode-reduce-overhead_compile"
    assert [record.launches(look(f"{few}_{v}")) for v in ("compile", graph)] == [5, 2]
    assert busy(f"{many}_{graph}") > busy(f"{many}_compile")
    assert busy(f"{many}_mode-max-autotune_compile") == max(
        busy(str(path.relative_to(record.REFERENCE).with_suffix("")))
        for path in record.REFERENCE.glob(f"{many}_*.json"))
    # "Steps that the CPU bounds differ by a factor of two between processes", here of 16 rows, eager.
    bench = json.loads((REFERENCE / "bench_fused.json").read_text("utf-8"))["steps_by_size"]["16x768x3072"]
    assert step(f"{few}_eager") / 1e3 > 2 * bench["eager"]
    gemms = [[row["name"].startswith("nvjet") for row in look(f"{many}_mode-{tuner}_compile")["kernels"]].count(True)
             for tuner in ("max-autotune-no-cudagraphs", "max-autotune")]
    assert gemms == [2, 0]
    large, small = "01_matmul_add/4096_bf16_warm", "01_matmul_add/64_bf16_warm"
    assert busy(f"{large}_{graph}") > 1.2 * busy(f"{large}_compile")
    assert [record.launches(look(f"{small}_{v}")) for v in ("compile", graph)] == [2, 2]
    assert max(step(f"{small}_{v}") for v in ("eager", "addmm")) < step(f"{small}_compile") / 2
    assert max(step(f"{small}_{v}") for v in ("eager", "addmm")) < min(
        mode(small, m) for m in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"))


def test_what_the_readme_says_of_launches_and_lengths():
    rows = [line.split(" | ") for line in record.launch_table().splitlines()[2:]]
    assert [float(row[2]) for row in rows] == [2, 8, 16, 16]
    slow, *others = (float(row[3].split()[0]) for row in rows)
    assert 1.4 < slow / max(others) < 1.6
    trace = read.load(str(record.REFERENCE / "03_kernels_mlp/64_128-192-256_768_3072_compile.json"))
    tuner = [e for e in trace["cpu"] if e["name"].startswith("CachingAutotuner.benchmark_all_configs (")]
    step = [e["name"] for e in read.ancestors(tuner[0])][-1]
    assert len(tuner) == 1 and step == "ProfilerStep#3"
    ran = [e for e in trace["gpu"] if e["step"] == 1 and e["name"].startswith("triton_poi")]
    assert 175 < len(ran) < 190 and len(record.tuning().splitlines()) == 4
    took = {tuple(line.split(" | ")[:2]): [float(cell.split()[0].replace(",", "")) for cell in line.split(" | ")[2:]]
            for line in record.lengths().splitlines()[2:]}
    slow = {what for (what, (first, second, third)) in took.items() if second > 50 * max(first, third)}
    assert slow == {("| seq 192", "compile"), ("| hidden 2048", "liger")}
    first, second, third = took["| seq 192", "eager"]
    assert second > first
    # "A second", "a tenth of a second", and of the latter most in the first aten::mm
    assert 900 < took["| seq 192", "compile"][1] < 1100 and 80 < took["| hidden 2048", "liger"][1] < 130
    cold = record.looker(REFERENCE)("01_matmul_add/64_bf16_cold_schedule-0-0-3_eager")
    gemm = next(e["dur"] for e in cold["events"] if e["name"] == "aten::mm")
    assert 80e6 < cold["steps"][0]["recorded"] < 130e6 and gemm > cold["steps"][0]["recorded"] / 2


def test_readme_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2 and commands[1].endswith("-m pytest")
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for script in set(re.findall(r"\b0\w+\.py\b", text)):
        assert (ROOT / script).is_file()

"""The documents and the reference traces: up to date, whole, and free of anything private."""
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "traces"), str(ROOT / "tests")]
import read                                 # noqa: E402
import record                               # noqa: E402
from test_scripts import check_private, load, spans    # noqa: E402

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
    names = [e["name"] for e in spans(trace) if e["name"].startswith("ProfilerStep")
             and e["cat"] == "user_annotation"]
    assert names == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    module = load(script)
    steps, lost = module.launched(trace, "cuda")
    assert lost == 0 and lesson["notes"] == []
    for step in steps:
        assert [op for op, events in step if any(map(module.is_kernel, events))] == [
            op for op, _ in steps[0]]
        assert len(step) == len(module.GUESS[variant])
        assert all(map(module.fnmatch.fnmatchcase, [op for op, _ in step], module.GUESS[variant]))
    assert path.with_suffix(".txt").is_file()
    assert f"  {trace['traceName']}\n" in (path.parent / "output.txt").read_text("utf-8")


def test_output_is_that_of_the_traces():
    """The README's run and the committed traces are one recording."""
    output = (ROOT / "traces/h200/03_kernels_mlp/output.txt").read_text("utf-8")
    for path in (ROOT / "traces/h200/03_kernels_mlp").glob("*.json"):
        kernels = [e for e in spans(json.loads(path.read_text("utf-8"))) if e["cat"] == "kernel"]
        for name in {e["name"] for e in kernels}:
            assert name[-12:] in output
        durations = [sorted(e["dur"] for e in kernels[i::len(kernels) // 3])[1]
                     for i in range(len(kernels) // 3)]
        section = output.split(f"\n{path.stem.split('_')[-1]}\n")[1].split("The guess")[0]
        shown = [float(us) for us in re.findall(r" (\d+\.\d\d)  (?!Mem)", section)]
        assert shown == [round(us, 2) for us in durations]


def test_claims_that_do_not_hold_on_the_h200():
    look = record.looker(record.REFERENCE)
    assert [claim for claim, _, check in record.CLAIMS if not check(look)[0]] == [
        "... since it is cold: a warm run has none",
        "aten::mm asks for the occupancy before it launches",
        "... and that GEMM is the kernel of eager",
    ]


@pytest.mark.parametrize("claim, check", [(claim, check) for claim, _, check in record.CLAIMS])
def test_a_claim_can_fail(claim, check):
    """Shown some other trace in place of its own, no claim holds throughout."""
    look = record.looker(record.REFERENCE)
    outcomes = [check(look)[0]]
    for path in record.REFERENCE.glob("0*/*.json"):     # other GPUs' traces may lie beside these
        other = str(path.relative_to(record.REFERENCE).with_suffix(""))
        outcomes.append(record.held(check, lambda name: look(other))[0])
    assert False in outcomes


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


def test_one_run_proves_little():
    """What the README says of compile: slower than eager in one run, faster in another."""
    look = record.looker(record.REFERENCE)
    ratios = [look(f"{script}/64_128_768_3072_compile")["unprofiled_ns"]
              / look(f"{script}/64_128_768_3072_eager")["unprofiled_ns"]
              for script in ("03_kernels_mlp", "03_simple_mlp")]
    assert ratios[0] > 1 > ratios[1]


def test_readme_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2 and commands[1].endswith("-m pytest")
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for script in set(re.findall(r"\b0\w+\.py\b", text)):
        assert (ROOT / script).is_file()

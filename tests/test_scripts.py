"""Run the scripts as a reader does, each the only file in its folder, and look into what they wrote."""
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("0*.py"))
SMALL = {
    "01_matmul_add": ["--size", "64", "--warmup"],
    "02_linear": ["--batch", "128", "--in_dim", "32", "--out_dim", "64"],
    "03_simple_mlp": ["--batch", "2", "--seq", "16", "--dim", "64", "--hidden", "128"],
    "03_kernels_mlp": ["--batch", "2", "--seq", "16", "--dim", "64", "--hidden", "128"],
}
# The commands of the posts, and the files that they name: TAG_VARIANT.
POSTS = [
    ("01_matmul_add --size 64", ["64_bf16_cold_eager"]),
    ("01_matmul_add --size 4096", ["4096_bf16_cold_eager"]),
    ("01_matmul_add --warmup",
     ["64_bf16_warm_eager", "64_bf16_warm_compile", "64_bf16_warm_addmm"]),
    ("01_matmul_add --size 4096 --warmup --compile", ["4096_bf16_warm_compile"]),
    ("02_linear --batch 1024 --in_dim 32 --out_dim 64",
     ["1024_32_64_eager", "1024_32_64_compile"]),
    ("02_linear --batch 1024 --in_dim 32 --out_dim 64 --compile", ["1024_32_64_compile"]),
    ("03_simple_mlp --batch 64 --seq 128 --dim 768 --hidden 3072",
     ["64_128_768_3072_eager", "64_128_768_3072_compile"]),
    ("03_kernels_mlp --batch 64 --seq 128 --dim 768 --hidden 3072",
     ["64_128_768_3072_eager", "64_128_768_3072_compile"]),
]
ANNOTATION = {"01_matmul_add": "matmul_add", "02_linear": "linear_fwd",
              "03_simple_mlp": "mlp_fwd", "03_kernels_mlp": "kernels_mlp_fwd"}
# What a CPU runs in one step: the outermost operators that compute, by script and variant.
MM, FUSED = "aten::mm", r"graph_\d+_cpp_fused__unsafe_view_gelu_mul_0"
MLP = {"eager": [MM, MM, "aten::gelu", "aten::mul", MM], "compile": [MM, MM, FUSED, MM]}
WORK = {
    "01_matmul_add": {"eager": [MM, "aten::add"], "compile": ["aten::addmm"], "addmm": ["aten::addmm"]},
    "02_linear": {"eager": ["aten::addmm"], "compile": ["aten::addmm"]},
    "03_simple_mlp": MLP,
    "03_kernels_mlp": MLP,
}
# The dispatch chain of the posts: each name lies within the one before it.
CHAINS = {
    ("01_matmul_add", "eager"): ["aten::matmul", "aten::mm"],
    ("01_matmul_add", "compile"): ["Torch-Compiled Region: 0/0", "aten::addmm"],
    ("01_matmul_add", "addmm"): ["aten::addmm"],
    ("02_linear", "eager"): ["aten::linear", "aten::addmm"],
    ("02_linear", "compile"): ["Torch-Compiled Region: 0/0", "aten::addmm"],
    ("03_simple_mlp", "eager"): ["aten::linear", "aten::matmul", "aten::mm"],
    ("03_simple_mlp", "compile"): ["Torch-Compiled Region: 0/0", MM],
    ("03_kernels_mlp", "eager"): ["aten::linear", "aten::matmul", "aten::mm"],
    ("03_kernels_mlp", "compile"): ["Torch-Compiled Region: 0/0", MM],
}


def run(folder, script, *arguments, **environment):
    """Copy the script, alone, into folder and run it there, as a reader without a GPU would."""
    shutil.copy(ROOT / f"{script}.py", folder)
    return subprocess.run([sys.executable, f"{script}.py", *arguments], cwd=folder, text=True,
                          capture_output=True, timeout=900,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment)


def load(script):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spans(trace):
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and "cat" in e]


def inside(outer, inner):
    return (outer["tid"] == inner["tid"] and outer["ts"] <= inner["ts"]
            and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def strings(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def check_private(trace):
    """No path and no host name of the machine that recorded the trace."""
    for text in strings(trace):
        assert not re.search(r"(^|[\s\"'=:])(/[\w.-]+){2,}", text), text
        assert socket.gethostname() not in text.split(), text
    assert "host_name" not in trace


def check_trace(path, script, variant):
    """What the posts say of a trace, looked up in the file's own events."""
    trace = json.loads(path.read_text("utf-8"))
    check_private(trace)
    assert trace["traceName"] == f"traces/{script}/{path.name}"
    assert trace["lesson"]["script"] == script and trace["lesson"]["variant"] == variant
    assert trace["lesson"]["step_us"] > 0 and trace["lesson"]["notes"] == []
    events = spans(trace)
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in steps] == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    for step in steps:
        [region] = [e for e in events if e["name"] == ANNOTATION[script] and inside(step, e)]
        chain = [step, region]
        for name in CHAINS[script, variant]:
            chain.append(next(e for e in events if e["name"] == name and inside(chain[-1], e)))
        within = [e for e in events if e["cat"] == "cpu_op" and inside(region, e)]
        names = [e["name"] for e in within]
        # Wrappers and views hold or precede the work; whatever lies within work is part of it.
        pattern = "|".join(dict.fromkeys(WORK[script][variant]))
        work = [e for e in within if re.fullmatch(pattern, e["name"])]
        assert len(work) == len(WORK[script][variant]), names
        assert all(map(re.fullmatch, WORK[script][variant], (e["name"] for e in work))), names
        if variant == "compile":
            assert "TorchDynamo Cache Lookup" in names
            assert not {"aten::gelu", "aten::mul", "aten::add", "aten::t"} & set(names)
    table = path.with_suffix(".txt").read_text("utf-8")
    assert "Self CPU" in table and len(re.findall(r"^ +aten::\w+ ", table, re.M)) <= 15


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A fresh Inductor cache, the first time."""
    return str(tmp_path_factory.mktemp("inductor"))


def name_here(script, name):
    """The posts' file name; a processor without a bf16 matmul uses fp32, and says so in the name."""
    cpu = torch.cpu.get_capabilities()
    if cpu.get("avx512_bf16") or cpu.get("amx_bf16"):
        return name
    if "_bf16_" in name:
        return name.replace("bf16", "fp32")
    return re.sub("_(?=[a-z]+$)", "_dtype-fp32_", name)


@pytest.mark.parametrize("command, names", POSTS, ids=[command for command, _ in POSTS])
def test_commands_of_the_posts(tmp_path, cache, command, names):
    script, *arguments = command.split()
    done = run(tmp_path, script, *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    skipped = re.findall("^(liger|fused): a Triton kernel needs a GPU.*\n", done.stderr, re.M)
    assert skipped == ["liger", "fused"] * (script == "03_kernels_mlp"), done.stderr
    assert done.stderr.count("\n") == len(skipped), done.stderr
    assert done.stdout.count("The guess holds.") == len(names), done.stdout
    stems = [f"traces/{script}/{name_here(script, name)}" for name in names]
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert written == {f"{script}.py"} | {f"{stem}.{kind}" for stem in stems for kind in ("json", "txt")}
    for stem in stems:
        assert f"  {stem}.json" in done.stdout
        check_trace(tmp_path / f"{stem}.json", script, stem.split("_")[-1])


def test_table_agrees_with_the_trace(tmp_path):
    done = run(tmp_path, "03_simple_mlp", *SMALL["03_simple_mlp"], "--dtype", "fp32")
    for variant, operators in MLP.items():
        trace = json.loads((tmp_path / f"traces/03_simple_mlp/2_16_64_128_dtype-fp32_{variant}.json")
                           .read_text("utf-8"))
        [row] = re.findall(rf"^{variant} +(\d+) +(\d+) +([\d.,]+) +([\d.,]+) +([\d.,]+) +([\d.,]+) +- "
                           r"+([\d.]+) +(\S+)$", done.stdout, re.M)
        steps = [e for e in spans(trace) if e["name"].startswith("ProfilerStep#")]
        work = [[e for e in spans(trace) if inside(step, e)
                 and re.fullmatch("|".join(dict.fromkeys(operators)), e["name"])] for step in steps]
        shown = lambda value: f"{value:,.{int(value < 1e4)}f}"
        median = lambda values: shown(sorted(values)[1])
        assert row[:2] == (str(len(operators)), "0")
        assert row[2] == median([sum(e["dur"] for e in step) for step in work])
        assert row[3] == median([step[-1]["ts"] + step[-1]["dur"] - step[0]["ts"] for step in work])
        assert row[4] == median([step["dur"] for step in steps])
        assert row[5] == shown(trace["lesson"]["step_us"])
        assert 0 < float(row[7]) < 1e-5


def test_failed_guess_is_marked_and_explained_and_fails_nothing(tmp_path):
    text = (ROOT / "02_linear.py").read_text("utf-8")
    guess = '"eager": ["aten::t", "aten::mm", "aten::add"],'
    (tmp_path / "mine.py").write_text(text.replace('"eager": ["aten::addmm"],', guess), "utf-8")
    done = subprocess.run([sys.executable, "mine.py", "--eager", "--batch", "8"], cwd=tmp_path,
                          capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    assert re.search(r"aten::t +aten::addmm .*\n  aten::mm +-\n  aten::add +-\n", done.stdout)
    assert "The guess does not hold." in done.stdout
    assert "aten::add is part of aten::addmm" in done.stdout
    assert "aten::t swaps two strides" in done.stdout


# ---- What happens if: the experiments, as flags ---------------------------------------------------


def trace_of(folder, name):
    return json.loads((folder / f"traces/{name}.json").read_text("utf-8"))


def of_step(trace, number):
    """The names of the CPU's operators in ProfilerStep#number, and how long it took."""
    [step] = [e for e in spans(trace) if e["name"] == f"ProfilerStep#{number}"]
    return [e["name"] for e in spans(trace) if e["cat"] == "cpu_op" and inside(step, e)], step["dur"]


@pytest.mark.parametrize("script, flags", SMALL.items())
def test_schedule(tmp_path, script, flags):
    """The posts' (0, 0, 3), on all four; without a warm-up of its own where there is one."""
    flags = [flag for flag in flags if flag != "--warmup"]
    done = run(tmp_path, script, *flags, "--eager", "--schedule", "0", "0", "3")
    assert done.returncode == 0 and done.stderr == "" and "The guess holds." in done.stdout
    [path] = tmp_path.glob(f"traces/{script}/*_schedule-0-0-3_eager.json")
    trace = json.loads(path.read_text("utf-8"))
    names = [e["name"] for e in spans(trace) if e["name"].startswith("ProfilerStep")]
    assert names == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    assert trace["lesson"]["arguments"]["schedule"] == [0, 0, 3]
    assert not re.search(" min +max ", done.stdout)


def test_schedule_of_many_steps(tmp_path):
    done = run(tmp_path, "01_matmul_add", "--schedule", "2", "1", "20")
    assert done.returncode == 0 and done.stderr == ""
    trace = trace_of(tmp_path, f"01_matmul_add/{name_here('01_matmul_add', '64_bf16_cold')}_schedule-2-1-20_eager")
    adds = sorted(e["dur"] for e in spans(trace) if e["name"] == "aten::add")
    names = [e["name"] for e in spans(trace) if e["name"].startswith("ProfilerStep")]
    assert names == [f"ProfilerStep#{i}" for i in range(3, 23)] and len(adds) == 20
    assert re.search(r"guess +trace +µs +min +max +kernel\n", done.stdout)
    row = f"{(adds[9] + adds[10]) / 2:.2f} +{adds[0]:.2f} +{adds[-1]:.2f}"
    assert re.search(rf"aten::add +aten::add +{row} +aten::add\n", done.stdout)
    assert "times from step to step" not in done.stdout         # a CPU's times are noise


@pytest.mark.parametrize("slowest, said", [(39, False), (40, True)])
def test_kernel_that_varies(capsys, slowest, said):
    script = load("01_matmul_add")
    step = lambda dur: [("aten::mm", [{"cat": "gpu_memset", "name": "Memset", "ts": 0, "dur": dur, "args": {}},
                                      {"cat": "kernel", "name": "gemm", "ts": 50, "dur": dur,
                                       "args": {"grid": [4, 2, 1], "block": [384, 1, 1]}}])]
    script.compare(["aten::mm"], [step(dur) for dur in (30, 31, slowest, 32)])
    shown = capsys.readouterr().out
    assert ("gemm varies 1.3 times from step to step: 30.00 to 40.00 µs." in shown) == said
    assert shown.count("varies") == said                        # a memset is no kernel
    assert re.search(rf" 31.50 +30.00 +{slowest}.00 +8 x 384  gemm\n", shown)


def test_compilation_that_is_recorded(tmp_path, cache):
    """What the compiler tries out on the CPU is no kernel, for the script and for read.py."""
    done = run(tmp_path, "01_matmul_add", "--compile", "--schedule", "0", "0", "1",
               TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0 and "The guess holds." in done.stdout, done.stdout
    [path] = tmp_path.glob("traces/01_matmul_add/*_schedule-0-0-1_compile.json")
    names, _ = of_step(json.loads(path.read_text("utf-8")), 0)
    assert names.count("aten::mm") + names.count("aten::addmm") > 1     # tried out, then used
    found = subprocess.run([sys.executable, ROOT / "traces/read.py", path, "--json"], text=True,
                           capture_output=True).stdout
    assert [row["name"] for row in json.loads(found)["kernels"]] == ["aten::addmm"]


def test_batch_and_addmm_by_hand(tmp_path):
    done = run(tmp_path, "01_matmul_add", "--batch", "8", "--warmup")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("The guess holds.") == 3
    work = {"eager": ["aten::bmm", "aten::add"], "compile": ["aten::bmm", r"graph_\d+_cpp_fused_add_0"],
            "addmm": ["aten::baddbmm"]}
    for variant, operators in work.items():
        stem = name_here("01_matmul_add", "64_bf16_warm") + f"_batch-8_{variant}"
        trace = trace_of(tmp_path, f"01_matmul_add/{stem}")
        names, _ = of_step(trace, 4)
        assert all(any(re.fullmatch(operator, name) for name in names) for operator in operators)
        assert ("aten::add" in names, "TorchDynamo Cache Lookup" in names) == (
            variant == "eager", variant == "compile")
        multiply = [e for e in spans(trace) if e["name"] == operators[0]]
        assert multiply[0]["args"]["Input Dims"][0] == [8, 64, 64]
        assert trace["lesson"]["error"] < 1e-2
    done = run(tmp_path, "01_matmul_add", "--addmm")
    assert done.returncode == 0 and "The guess holds." in done.stdout
    assert (tmp_path / f"traces/01_matmul_add/{name_here('01_matmul_add', '64_bf16_cold')}_addmm.json").is_file()


@pytest.mark.parametrize("script, flags", SMALL.items())
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_mode(tmp_path, cache, script, flags, mode):
    """A CPU has no graphs, so the guess of a graph fails there, and the run says why."""
    done = run(tmp_path, script, *flags, "--compile", "--mode", mode, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob(f"traces/{script}/*_mode-{mode}_compile.json")
    trace = json.loads(path.read_text("utf-8"))
    assert trace["lesson"]["arguments"]["mode"] == mode
    graph = mode == "reduce-overhead"
    assert ("The guess does not hold." in done.stdout) == graph == ("a CPU has none" in done.stdout)
    names, _ = of_step(trace, 4)
    for operator in WORK[script]["compile"]:
        assert any(re.fullmatch(operator, name) for name in names), names


@pytest.mark.parametrize("script", SMALL)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_reaches_the_compiler(monkeypatch, script, mode):
    module, asked = load(script), []
    command = [script, *SMALL[script], "--compile", "--mode", mode]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(module, "run", lambda name, tag, args: module.build("compile", args))
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    module.main()
    assert asked == [mode]


def test_guess_for_the_flags_in_use():
    guess = load("01_matmul_add").guess
    assert guess("eager", []) == guess("eager", ["--size", "8"]) == ["aten::mm", "aten::add"]
    assert guess("eager", ["--batch", "8"]) == ["aten::bmm", "aten::add"]
    assert guess("compile", ["--mode", "max-autotune-no-cudagraphs"]) == ["*addmm*"]
    both = ["--batch", "8", "--mode"]
    assert guess("compile", [*both, "max-autotune"]) == ["aten::_foreach_copy_", "Torch-Compiled*"]
    assert guess("compile", [*both, "max-autotune-no-cudagraphs"]) == ["*bmm*", "*fused_add*"]


@pytest.mark.parametrize("active, recorded", [(3, [2, 3, 4]), (5, [2, 3, 4, 2, 3])])
def test_whose_turn_it_is(active, recorded):
    """The first length until the recording begins, all in turns, then the last one for good."""
    args = SimpleNamespace(device="cpu", dtype="fp32", batch=1, seq=[2, 3, 4], dim=8, hidden=[8],
                           mode="default", schedule=[1, 2, active])
    step, reference = load("03_kernels_mlp").build("eager", args)
    lengths = [step().shape[1] for _ in range(6 + active + 4)]
    assert lengths == [2] * 6 + recorded + [recorded[-1]] * 4
    torch.testing.assert_close(step().double(), reference(), rtol=1e-4, atol=1e-4)


def test_lengths_take_turns(tmp_path, cache):
    """The second length compiles again, for any length; it is in the output and in the trace."""
    flags = "--batch 2 --seq 16 24 32 --dim 64 --hidden 128 --eager --compile".split()
    done = run(tmp_path, "03_kernels_mlp", *flags, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("The guess holds.") == 2
    eager, compiled = done.stdout.split("\ncompile\n")
    first = r"  hidden 128, seq {}: first call [\d.]+ ms\n"
    assert re.search("".join(map(first.format, (16, 24, 32))), eager)
    dynamo = r"    Dynamo compiled forward, graph 0/{}, in [\d.]+ ms\n"
    why = "    since 0/0: tensor 'x' size mismatch at index 1. expected 16, actual 24\n"
    assert re.match(first.format(16) + dynamo.format(0) + first.format(24) + dynamo.format(1) + why
                    + first.format(32) + "  guess ", compiled), compiled
    for variant in "eager", "compile":
        trace = trace_of(tmp_path, "03_kernels_mlp/" + name_here("03_kernels_mlp", f"2_16-24-32_64_128_{variant}"))
        again = ["_compile.compile_inner (dynamo_timed)" in of_step(trace, i)[0] for i in (2, 3, 4)]
        assert again == [False, variant == "compile", False]
        products = [e["args"]["Input Dims"] for e in spans(trace) if e["name"] == "aten::mm"]
        products = products if variant == "eager" else products[-3:]    # those of the compiler have none
        rows = [2 * seq for seq in (16, 24, 32) for _ in range(3)]
        assert [x[0] for x, *_ in products] == rows[-len(products):]
        assert trace["lesson"]["notes"] == [] and trace["lesson"]["error"] < 1e-2
        # The table is of the last length alone.
        last = [e["dur"] for e in spans(trace) if e["name"] == "ProfilerStep#4"]
        [row] = re.findall(rf"^{variant} .*$", done.stdout.split("One step")[1], re.M)
        assert row.split()[5] == f"{last[0]:,.{int(last[0] < 1e4)}f}"


def test_widths_take_turns(tmp_path, cache):
    flags = "--batch 2 --seq 16 --dim 64 --hidden 128 192 --compile --schedule 1 1 4".split()
    done = run(tmp_path, "03_kernels_mlp", *flags, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(r"hidden 192, seq 16: first call .*\n    Dynamo compiled forward, graph 0/1, .*\n"
                     r"    since 0/0: tensor .*weight.* expected 128, actual 192\n", done.stdout)
    [path] = tmp_path.glob("traces/03_kernels_mlp/2_16_64_128-192_*schedule-1-1-4_compile.json")
    trace = json.loads(path.read_text("utf-8"))
    again = ["_compile.compile_inner (dynamo_timed)" in of_step(trace, i)[0] for i in (2, 3, 4, 5)]
    assert again == [False, True, False, False]
    [row] = re.findall(r"^compile .*\d.*$", done.stdout, re.M)
    cpu = (of_step(trace, 3)[1] + of_step(trace, 5)[1]) / 2     # the steps of the last width alone
    assert row.split()[5] == f"{cpu:,.{int(cpu < 1e4)}f}"


def test_dynamo_gives_up(tmp_path, cache):
    widths = [str(8 * i) for i in range(1, 11)]
    done = run(tmp_path, "03_kernels_mlp", "--batch", "2", "--seq", "4", "--dim", "8", "--hidden", *widths,
               "--compile", "--schedule", "1", "1", "10", TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Dynamo compiled forward") == 8
    assert done.stdout.count("Dynamo gave up, after torch._dynamo.config.recompile_limit") >= 1


def test_flags_that_do_not_fit_together(tmp_path):
    for command, why in [
            ("02_linear --eager --mode max-autotune", "--mode is torch.compile's: add --compile"),
            ("03_kernels_mlp --liger --fused --mode reduce-overhead", "--mode is torch.compile's: add --compile"),
            ("03_kernels_mlp --seq 16 24 --hidden 8 16", "4 sizes take turns: record as many steps, --schedule 1 1 4"),
            ("03_kernels_mlp --seq 16 24 --mode max-autotune", "a CUDA graph is of one size: choose one, or another --mode"),
            ("02_linear --schedule 1 1 0", "--schedule records no step: ACTIVE must be 1 or more"),
            ("02_linear --schedule 1 1", "argument --schedule: expected 3 arguments"),
            ("02_linear --schedule 1 -1 3", "argument --schedule: '-1' is not a whole number of 0 or more"),
            ("02_linear --schedule 1 x 3", "argument --schedule: 'x' is not a whole number of 0 or more"),
            ("02_linear --mode fast", "argument --mode: invalid choice: 'fast'"),
            ("01_matmul_add --batch 0", "argument --batch: '0' is not a whole number of 1 or more")]:
        done = run(tmp_path, *command.split())
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert why in done.stderr.splitlines()[-1], done.stderr
    # A cold run takes one variant: with --mode that is compile.
    done = run(tmp_path, "01_matmul_add", "--mode", "reduce-overhead")
    assert done.returncode == 0 and "\ncompile\n" in done.stdout and "\neager\n" not in done.stdout


@pytest.mark.parametrize("script", SMALL)
def test_help_says_what_to_look_for(tmp_path, script):
    shown = " ".join(run(tmp_path, script, "--help").stdout.split())
    flags = ["--schedule", "--mode"] + {"01_matmul_add": ["--batch"], "03_kernels_mlp": ["--seq", "--hidden"]
                                        }.get(script, [])
    for flag in flags:
        [text] = re.findall(rf" {flag} [A-Z{{].*?(?= --\w|$)", shown.split("options:")[1])
        assert re.search("Look (also )?for", text), text


# ---- What a reader gets wrong, and what a machine lacks ------------------------------------------


def one_line(done, code, *words):
    """The run ended with this code and one line on stderr that has the words."""
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr and len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], done.stderr


@pytest.mark.parametrize("script, flags", SMALL.items())
@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", ""])
def test_bad_size(tmp_path, script, flags, value):
    done = run(tmp_path, script, f"{flags[0]}={value}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        f"argument {flags[0]}: {value!r} is not a whole number of 1 or more")


@pytest.mark.parametrize("size", ["20000000", "1000000000000", "1" + "0" * 30])
def test_size_beyond_memory(tmp_path, size):
    done = run(tmp_path, "01_matmul_add", "--size", size)
    one_line(done, 1, "01_matmul_add: eager: not enough memory: choose smaller sizes")
    done = run(tmp_path, "03_simple_mlp", "--hidden", size, "--eager")
    one_line(done, 1, "03_simple_mlp: eager: not enough memory: choose smaller sizes")


def test_bad_flags(tmp_path):
    done = run(tmp_path, "02_linear", "--dtype", "int8")
    assert done.returncode == 2 and "invalid choice: 'int8'" in done.stderr
    done = run(tmp_path, "01_matmul_add", "--eager", "--compile")
    assert done.returncode == 2 and "add --warmup" in done.stderr
    for script in SMALL:
        one_line(run(tmp_path, script, "--device", "cuda"), 1, "--device cuda", "no GPU")
    for variant in "liger", "fused":
        done = run(tmp_path, "03_kernels_mlp", f"--{variant}")
        one_line(done, 1, f"{variant}: a Triton kernel needs a GPU",
                 f"traces/h200/03_kernels_mlp/64_128_768_3072_{variant}.json")


def test_no_bf16_matmul(tmp_path):
    code = "import runpy, torch; torch.cpu.get_capabilities = dict; runpy.run_path('02_linear.py', {}, '__main__')"
    shutil.copy(ROOT / "02_linear.py", tmp_path)
    done = subprocess.run([sys.executable, "-c", code, "--eager"], cwd=tmp_path, text=True,
                          capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "no bf16 matmul: fp32 is used" in done.stdout
    assert (tmp_path / "traces/02_linear/1024_32_64_dtype-fp32_eager.json").is_file()


def test_trace_folder_is_a_file(tmp_path):
    (tmp_path / "traces").write_text("mine")
    one_line(run(tmp_path, "02_linear", "--eager"), 1, "02_linear: eager:", "traces", "move away")
    assert (tmp_path / "traces").read_text() == "mine"


def test_output_that_nobody_reads_or_that_lacks_letters(tmp_path):
    shutil.copy(ROOT / "02_linear.py", tmp_path)
    buffered = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": ""}
    for shell in (f"{sys.executable} 02_linear.py --eager --batch 8 | head -1",
                  f"PYTHONIOENCODING=ascii {sys.executable} 02_linear.py --eager --batch 9"):
        done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], cwd=tmp_path, text=True,
                              capture_output=True, env=buffered)
        assert done.stderr == "" and "02_linear in" in done.stdout
    with open("/dev/full", "w") as full:
        no_room = subprocess.run([sys.executable, "02_linear.py", "--eager", "--batch", "8"], cwd=tmp_path,
                                 text=True, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert no_room.returncode == 1 and no_room.stderr == "output: No space left on device\n"
    assert done.returncode == 0 and "?s  kernel" in done.stdout
    written = list((tmp_path / "traces/02_linear").glob("*.json"))
    assert "9_32_64" in "".join(path.name for path in written)
    assert all(json.loads(path.read_text("utf-8"))["traceEvents"] for path in written)


@pytest.fixture
def full(tmp_path):
    """A folder on a disk with no room left but a few KB."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("disk", ["traces", "tmp"])
def test_full_disk(tmp_path, full, disk):
    """The traces' disk is full, or the one on which PyTorch writes first, without a word."""
    done = run(tmp_path, "02_linear", "--eager")
    kept = (tmp_path / "traces/02_linear/1024_32_64_eager.json").read_bytes()
    if disk == "traces":
        shutil.copytree(tmp_path / "traces", full, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "traces")
        (tmp_path / "traces").symlink_to(full)
    (full / "filler").write_bytes(b"x" * (60_000 - sum(p.stat().st_size for p in full.rglob("*.*"))))
    done = run(tmp_path, "02_linear", "--eager", **({"TMPDIR": str(full)} if disk == "tmp" else {}))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]         # what Kineto says of it may stand above
    assert last.startswith("02_linear: eager: ") and "make room" in last
    assert (tmp_path / "traces/02_linear/1024_32_64_eager.json").read_bytes() == kept
    assert {path.name for path in (tmp_path / "traces/02_linear").iterdir()} == {
        "1024_32_64_eager.json", "1024_32_64_eager.txt"}


@pytest.mark.parametrize("missing", ["compiler", "Python.h"])
@pytest.mark.parametrize("state", ["fresh", "warm"])
def test_no_compiler_or_no_header(tmp_path, missing, state):
    """Inductor raises another exception when its cache already holds the kernel's source."""
    command = "03_simple_mlp", *SMALL["03_simple_mlp"]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    if state == "warm":
        assert run(tmp_path, *command, **environment).returncode == 0
        for binary in (tmp_path / "cache").rglob("*.so"):
            binary.unlink()
    fake = tmp_path / "bin/g++"
    fake.parent.mkdir()
    if missing == "Python.h":
        # A compiler that is not told where Python's headers are.
        fake.write_text("#!/usr/bin/env bash\n"
                        'for a; do [ -f "${a#-I}/Python.h" ] || args+=("$a"); done\n'
                        f'exec {shutil.which("g++")} "${{args[@]}}"\n')
    else:
        fake.write_text("#!/bin/sh\nexit 127\n")
        environment["CXX"] = str(tmp_path / "bin/none")
    fake.chmod(0o755)
    if missing == "Python.h":
        environment["CXX"] = str(fake)
    done = run(tmp_path, *command, **environment)
    words = ["g++"] if missing == "compiler" else ["python3-dev"]
    one_line(done, 1, "03_simple_mlp: compile:", *words)
    assert (tmp_path / "traces/03_simple_mlp/2_16_64_128_eager.json").is_file()
    assert "eager  " in done.stdout


def test_other_errors(monkeypatch, capsys):
    script = load("03_kernels_mlp")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ImportError) as missing:
        script.liger_mlp(script.SimpleGeGLUMLP(8, 8))
    assert script.cure(missing.value).endswith("pip install -r requirements.txt")
    assert "smaller sizes" in script.cure(torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
    assert capsys.readouterr().err == ""
    try:
        raise RuntimeError("nobody knows")
    except RuntimeError as error:
        assert script.cure(error) == "failed, see above"
    assert "nobody knows" in capsys.readouterr().err


def test_interrupt(tmp_path):
    shutil.copy(ROOT / "03_simple_mlp.py", tmp_path)
    with subprocess.Popen([sys.executable, "03_simple_mlp.py", "--batch", "16"], cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as running:
        for line in running.stdout:
            if line == "eager\n":
                break
        time.sleep(2)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in stderr
    for path in tmp_path.rglob("traces/*/*"):       # whole files or none
        assert path.suffix == ".txt" or json.loads(path.read_text("utf-8"))["lesson"]


def gpu_trace(kernels):
    """A trace as PyTorch writes it on a GPU, of three steps with two launches, not all recorded."""
    events = []
    for i in range(3):
        t = 1000.0 * i
        events.append(dict(cat="user_annotation", name=f"ProfilerStep#{i + 2}", ts=t, dur=900,
                           args={"External id": 10 * i + 1}))
        for j in range(2):
            events.append(dict(cat="cpu_op", name="aten::mm", ts=t + 100 * j, dur=50,
                               args={"External id": 10 * i + j + 2}))
            events.append(dict(cat="cuda_runtime", name="cudaLaunchKernel", ts=t + 100 * j, dur=5,
                               args={"External id": 10 * i + j + 2, "correlation": 2 * i + j}))
            if 2 * i + j in kernels:
                events.append(dict(cat="kernel", name="gemm", ts=t + 100 * j + 60, dur=30,
                                   args={"External id": 10 * i + j + 2, "correlation": 2 * i + j}))
    # Still running when the recording began: launched before it, and in no step.
    events.append(dict(cat="kernel", name="before", ts=10, dur=5,
                       args={"External id": 99, "correlation": 99}))
    return {"traceEvents": [event | {"ph": "X", "tid": 1} for event in events]}


@pytest.mark.parametrize("kernels, seen", [(range(6), True), ([0, 1, 2, 3, 4], False), ([], False)])
def test_profiler_that_misses_kernels(monkeypatch, tmp_path, capsys, kernels, seen):
    script = load("01_matmul_add")
    step = lambda: torch.ones(2)
    monkeypatch.setattr(script, "build", lambda variant, args: (step, step))
    monkeypatch.setattr(script, "profile", lambda step, device, schedule: (gpu_trace(kernels), "table"))
    monkeypatch.setattr(script, "time_step", lambda step, device: 1.0)
    args = SimpleNamespace(device="cuda", warmup=False, schedule=[1, 1, 3], flags=[], sizes=1)
    lesson = {"device_type": "cuda", "notes": []}
    cells = script.measure("eager", tmp_path / "traces/t_eager.json", args, lesson)
    note = "The profiler missed kernels"
    saved = json.loads((tmp_path / "traces/t_eager.json").read_text())["lesson"]["notes"]
    if seen:
        assert cells[:4] == [2, 0, 60, 130] and saved == []
    else:
        assert cells[:4] == ["?"] * 4 and saved[0].startswith(note)
        assert note in capsys.readouterr().out


# ---- The files themselves ------------------------------------------------------------------------


def test_real_errors_pass_through_quiet(capfd):
    script = load("02_linear")
    with script.quiet():
        os.write(2, b"USDT:2026 SyncActivityProfilerHandler.cpp:39] profiler_start\n"
                    b"ERROR: gpuGetDeviceCount failed with code 35\nERROR: no space\n")
    with pytest.raises(KeyboardInterrupt), script.quiet():
        os.write(2, b"half a line")
        raise KeyboardInterrupt
    assert capfd.readouterr().err == "ERROR: no space\nhalf a line"


def test_shared_lines_are_the_same():
    mark = "# ---- What follows is the same in all four scripts"
    assert len(SCRIPTS) == 4
    assert len({path.read_text("utf-8").split(mark, 1)[1] for path in SCRIPTS}) == 1
    for path in SCRIPTS:
        assert max(map(len, path.read_text("utf-8").splitlines())) <= 100


def test_dependencies_are_what_is_imported():
    wanted = {re.match(r"[\w-]+", line)[0]: line for line in
              (ROOT / "requirements.txt").read_text("utf-8").split("\n") if line}
    imported = set()
    for path in SCRIPTS:
        text = path.read_text("utf-8")
        header = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", text)[1].replace("# ", "")
        dependencies = ast.literal_eval(re.search(r"dependencies = (\[.*?\])", header, re.S)[1])
        names = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
        names = {name.replace("_", "-") for name in names - sys.stdlib_module_names}
        assert {line.replace("'", '"') for line in dependencies} == {wanted[name] for name in names}
        imported |= names
    assert imported == set(wanted)


def test_functions_to_copy(tmp_path):
    """Another program imports a script and profiles its own step with it; the import does nothing."""
    (tmp_path / "other.py").write_text("""
import json, torch
from importlib import import_module
lesson = import_module("03_kernels_mlp")
x = torch.randn(32, 32)
trace, table = lesson.profile(lambda: (x @ x).relu(), "cpu")
steps, lost = lesson.launched(trace, "cpu")
print(json.dumps([[operator for operator, _ in step] for step in steps]), lost)
print(lesson.time_step(lambda: x @ x, "cpu") > 0, "aten::mm" in table)
mlp = lesson.SimpleGeGLUMLP(8, 16)
print(list(mlp(torch.randn(2, 3, 8)).shape))
""")
    shutil.copy(ROOT / "03_kernels_mlp.py", tmp_path)
    done = subprocess.run([sys.executable, "other.py"], cwd=tmp_path, text=True, capture_output=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.stderr == ""
    one = '["aten::mm", "aten::relu"]'
    assert done.stdout == f"[{one}, {one}, {one}] 0\nTrue True\n[2, 3, 8]\n"
    assert len(list(tmp_path.iterdir())) == 2


# ---- On a GPU ------------------------------------------------------------------------------------


def on_gpu(folder, script, *arguments):
    shutil.copy(ROOT / f"{script}.py", folder)
    return subprocess.run([sys.executable, f"{script}.py", *arguments], cwd=folder, text=True,
                          capture_output=True)


@pytest.mark.gpu
def test_kernels_mlp_on_a_gpu(tmp_path):
    start = time.monotonic()
    done = on_gpu(tmp_path, "03_kernels_mlp")
    assert time.monotonic() - start < 60
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("The guess holds.") == 4, done.stdout
    for variant, kernels in {"eager": 5, "compile": 4, "liger": 4, "fused": 2}.items():
        trace = json.loads((tmp_path / f"traces/03_kernels_mlp/64_128_768_3072_{variant}.json").read_text())
        check_private(trace)
        names = [e["name"] for e in spans(trace) if e["cat"] == "kernel"]
        assert len(names) == 3 * kernels
        assert names.count("_geglu_tanh_forward_kernel") == 3 * (variant == "liger")
        assert names.count("geglu_gemm") == 3 * (variant == "fused")
        assert sum("triton_poi_fused" in name for name in names) == 3 * (variant == "compile")
        assert bool([e for e in spans(trace) if "TorchDynamo" in e["name"]]) == (variant == "compile")
        assert trace["lesson"]["error"] < 1e-2


@pytest.mark.gpu
def test_faults_on_a_gpu(tmp_path):
    one_line(on_gpu(tmp_path, "01_matmul_add", "--size", "400000"), 1, "choose smaller sizes")
    done = on_gpu(tmp_path, "02_linear", "--device", "cpu", "--dtype", "fp32", "--eager")
    assert done.returncode == 0
    assert (tmp_path / "traces/02_linear/1024_32_64_dtype-fp32_device-cpu_eager.json").is_file()

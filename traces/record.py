"""Record the reference traces anew on the GPU at hand, or bring the documents up to date.

    python traces/record.py             record into traces/GPU/, GPU a short name of this one: h200
    python traces/record.py --docs      write the generated parts of the READMEs from traces/h200/

All runs go to a temporary folder first. Only when every one of them ended well do their traces,
tables and output take the place of older ones. Then each claim of the posts is held against them.
"""
import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import read

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces/h200"
RUNS = """
03_kernels_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072
03_kernels_mlp.py --seq 128 192 256
03_kernels_mlp.py --hidden 3072 2048 --liger --fused
03_simple_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072 --eager
03_simple_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072 --compile
03_simple_mlp.py --compile --mode reduce-overhead
03_simple_mlp.py --compile --mode max-autotune-no-cudagraphs
03_simple_mlp.py --compile --mode max-autotune
03_simple_mlp.py --batch 1 --seq 16
03_simple_mlp.py --batch 1 --seq 16 --compile --mode reduce-overhead
02_linear.py --batch 1024 --in_dim 32 --out_dim 64
01_matmul_add.py --size 64
01_matmul_add.py --size 64 --compile
01_matmul_add.py --size 64 --warmup
01_matmul_add.py --size 4096 --warmup
01_matmul_add.py --size 64 --schedule 0 0 3
01_matmul_add.py --size 4096 --warmup --eager --schedule 0 0 20
01_matmul_add.py --size 64 --warmup --compile --mode reduce-overhead
01_matmul_add.py --size 64 --warmup --compile --mode max-autotune-no-cudagraphs
01_matmul_add.py --size 64 --warmup --compile --mode max-autotune
01_matmul_add.py --size 4096 --warmup --compile --mode reduce-overhead
01_matmul_add.py --size 4096 --warmup --compile --mode max-autotune-no-cudagraphs
01_matmul_add.py --size 4096 --warmup --compile --mode max-autotune
01_matmul_add.py --size 1024 --warmup --batch 8
01_matmul_add.py --size 512 --warmup --eager
01_matmul_add.py --size 8192 --warmup --eager
""".strip().splitlines()


def record(folder):
    """Run every command of RUNS in folder; what each prints is kept in SCRIPT/output.txt."""
    for command in RUNS:
        print(command, flush=True)
        script, *flags = command.split()
        # Inductor keeps what it once chose, good or bad: each command chooses for itself.
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/t"}
            done = subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, text=True,
                                  capture_output=True, env=env)
        if done.returncode:
            sys.exit(f"record.py: {command} failed, nothing was replaced:\n{done.stderr}")
        with open(folder / "traces" / script[:-3] / "output.txt", "a", encoding="utf-8") as output:
            output.write(f"$ python {command}\n{done.stdout}\n")


def short_name(gpu):
    """NVIDIA H200 -> h200, NVIDIA A100-SXM4-80GB -> a100, AMD Instinct MI300X -> mi300x."""
    words = re.sub(r"\b(NVIDIA|AMD|Instinct|GeForce|Tesla|RTX|Radeon)\b", "", gpu).split()
    return words[0].split("-")[0].lower()


# ---- The posts' claims: on an A100, and in these traces ----------------------------------------
# Each function takes look, which gives read.py's facts of a trace by its name. It returns whether
# the claim holds here and what the traces show.

MLP = "03_simple_mlp/64_128_768_3072_"
HAND = "03_kernels_mlp/64_128_768_3072_"
DYNAMO = ["TorchDynamo Cache Lookup", "Torch-Compiled Region: 0/0",
          "AOTDispatcher Runtime Wrapper Prologue"]


def us(ns):
    return f"{ns / 1e3:,.1f} µs"


def kernels(facts):
    return [row["name"] for row in facts["kernels"]]


def medians(rows):
    return ", ".join(f"{row['median_ns'] / 1e3:.1f}" for row in rows) + " µs"


def idle_at_64(look):
    facts = look("01_matmul_add/64_bf16_cold_eager")
    steps, busy = (sum(step[key] for step in facts["steps"]) for key in ("recorded", "kernels"))
    return facts["verdict"]["bound"] == "overhead" and busy < 0.1 * steps, (
        f"three steps of {us(steps)} with {us(busy)} of kernels: idle {1 - busy / steps:.0%}")


def busy_at_4096(look):
    facts = look("01_matmul_add/4096_bf16_warm_eager")
    gemm, add = facts["kernels"]
    return facts["verdict"]["bound"] == "compute" and gemm["median_ns"] > add["median_ns"], (
        f"a step of {us(facts['unprofiled_ns'])} without the profiler, kernels {us(facts['kernels_ns'])}, "
        f"of which the GEMM {us(gemm['median_ns'])}")


def first_step_is_wide(look):
    steps = look("01_matmul_add/64_bf16_cold_eager")["steps"]
    first, second, third = (step["recorded"] for step in steps)
    return first > 2 * max(second, third), f"#2 {us(first)}, #3 {us(second)}, #4 {us(third)}"


def only_when_cold(look):
    first, second, third = (step["recorded"] for step in look("01_matmul_add/64_bf16_warm_eager")["steps"])
    return first < 1.5 * max(second, third), (
        f"warm, too: #2 {us(first)}, #3 {us(second)}, #4 {us(third)}, so it is no sign of a cold start")


def wait_before_matmul(look):
    events = look("01_matmul_add/64_bf16_cold_eager")["events"]
    waits = [e["ts"] - e["parent"]["ts"] for e in events if e["name"] == "aten::matmul"]
    return waits[0] > 3 * max(waits[1:]), ", ".join(f"#{i} {us(w)}" for i, w in enumerate(waits, 2))


def dispatch_chain(look):
    facts = look("01_matmul_add/64_bf16_warm_eager")
    chains = [" > ".join([e["name"] for e in read.ancestors(event)][::-1]) for event in facts["events"]
              if event["cat"] in read.LAUNCH and event["parent"]]
    starts = ["matmul_add > aten::matmul > aten::mm", "matmul_add > aten::add"]
    return all(any(re.fullmatch(rf"ProfilerStep#4 > {start} > \w+", chain) for chain in chains)
               for start in starts), "; ".join(chain.split(" > ", 1)[1] for chain in chains[-2:])


def occupancy_query(look):
    events = look("01_matmul_add/64_bf16_warm_eager")["events"]
    queries = [e["name"] for e in events if "Occupancy" in e["name"]]
    launch = look("01_matmul_add/64_bf16_warm_eager")["kernels"][0]["launch"]
    return bool(queries), f"{len(queries)} queries; the GEMM is launched by {launch}"


def compiled_to_addmm(look):
    facts = look("01_matmul_add/4096_bf16_warm_compile")
    copies = [row for row in facts["memory"] if row["kind"] == "gpu_memcpy"]
    one = [row["op"] for row in facts["kernels"]] == ["aten::addmm"] and len(copies) == 1
    return one, (f"one {copies[0]['name']}, {us(copies[0]['median_ns'])}, then one GEMM, "
                 f"{us(facts['kernels'][0]['median_ns'])}")


def same_gemm_in_addmm(look):
    eager, addmm = (kernels(look(f"01_matmul_add/4096_bf16_warm_{v}"))[0] for v in ("eager", "compile"))
    return eager == addmm, f"another kernel: {eager} became {addmm}"


def dynamo_rows(look):
    operators = look("01_matmul_add/64_bf16_warm_compile")["operators"]
    found = [row for row in operators if row in DYNAMO or row.startswith("## Call CompiledFxGraph")]
    return len(found) == 4, ", ".join(row.split(" f")[0].strip("# ") for row in found)


def cpu_pays(look):
    eager, compiled = (look(f"01_matmul_add/64_bf16_warm_{v}") for v in ("eager", "compile"))
    ratio = compiled["unprofiled_ns"] / eager["unprofiled_ns"]
    return ratio > 1.2, (
        f"{us(eager['recorded_ns'])} to {us(compiled['recorded_ns'])} with the profiler, "
        f"{us(eager['unprofiled_ns'])} to {us(compiled['unprofiled_ns'])} without ({ratio:.1f} times)")


def transpose_is_free(look):
    facts = look("02_linear/1024_32_64_eager")
    launches = [e for e in facts["events"] if e["cat"] in read.LAUNCH
                and any(a["name"] == "aten::t" for a in read.ancestors(e))]
    return "aten::t" in facts["operators"] and not launches, f"{len(launches)} launches in aten::t"


def bias_in_epilogue(look):
    facts = look("02_linear/1024_32_64_eager")
    [name] = kernels(facts)
    return "aten::add" not in facts["operators"] and "bias" in name, (
        f"one kernel, its name says bias: {name}, {medians(facts['kernels'])}")


def linear_compiles_to_itself(look):
    eager, compiled = (look(f"02_linear/1024_32_64_{v}") for v in ("eager", "compile"))
    ran = [[(row["name"], row["grid"], row["block"]) for row in facts["kernels"]]
           for facts in (eager, compiled)]
    same = ran[0] == ran[1] and "aten::t" not in compiled["operators"]
    return same and DYNAMO[0] in compiled["operators"], "the same kernel and grid, no aten::t"


def layout_in_name(look):
    linear, matmul = (kernels(look(name))[0] for name in (
        "02_linear/1024_32_64_eager", "01_matmul_add/64_bf16_warm_eager"))
    return linear.endswith("_TNT") and matmul.endswith("_NNT"), (
        f"nvjet spells it TNT where the weight is transposed ({linear}), NNT where not ({matmul})")


def five_kernels(look):
    facts = look(MLP + "eager")
    five = ["aten::mm", "aten::mm", "aten::gelu", "aten::mul", "aten::mm"]
    return [row["op"] for row in facts["kernels"]] == five, (
        f"{len(facts['kernels'])} kernels, {medians(facts['kernels'])}, and "
        f"{len(facts['memory'])} memsets, which are no kernels")


def two_gemm_kernels(look):
    gate, up, _, _, down = look(MLP + "eager")["kernels"]
    return gate["name"] == up["name"] != down["name"], (
        f"{gate['flop'] / 1e9:.1f} GFLOP each, {medians([gate, up, down])}; "
        f"{gate['name']} twice, {down['name']}")


def views_launch_nothing(look):
    facts = look(MLP + "eager")
    views = {f"aten::{name}" for name in ("t", "transpose", "reshape", "view", "as_strided", "_unsafe_view")}
    ran = [e for e in facts["events"] if e["name"] in views]
    launches = [e for e in facts["events"] if e["cat"] in read.LAUNCH and e["parent"] in ran]
    return {e["name"] for e in ran} == views and not launches, (
        f"{len(launches)} launches in the {len(ran)} views of three steps")


def fused_by_inductor(look):
    eager, compiled = look(MLP + "eager"), look(MLP + "compile")
    gemms = [name for name in kernels(eager) if "nvjet" in name or "gemm" in name]
    [fused] = [row for row in compiled["kernels"] if row["name"].startswith("triton_poi_fused")]
    same = gemms == [name for name in kernels(compiled) if name != fused["name"]]
    return same and "aten::linear" not in compiled["operators"], (
        f"the same three GEMMs; {fused['name']} takes {us(fused['median_ns'])} for the "
        f"{us(sum(row['median_ns'] for row in eager['kernels'][2:4]))} of gelu and mul")


def traffic_saved(look):
    change = read.compare(look(MLP + "eager"), look(MLP + "compile"))
    saved = change["bytes_gone"] - change["bytes_new"]
    return saved == 2 * 8192 * 3072 * 2, (
        f"gelu(g) is {saved / 2e6:.1f} MB; a step moves {saved / 1e6:.1f} MB less")


def liger_by_hand(look):
    facts = look(HAND + "liger")
    [row] = [row for row in facts["kernels"] if row["name"] == "_geglu_tanh_forward_kernel"]
    return row["op"] == "LigerGELUMulFunction" and not any("Dynamo" in op for op in facts["operators"]), (
        f"one {row['name']}, {us(row['median_ns'])}; no Dynamo rows")


def liger_beside_inductor(look):
    liger, inductor = (look(HAND + variant)["kernels"][2]["median_ns"] for variant in ("liger", "compile"))
    return 1 < liger / inductor < 1.3, (
        f"{us(liger)} and {us(inductor)}, {liger / inductor:.2f} times; "
        "where Inductor launches its kernel otherwise, Liger's is the faster one: see above")


def buffer_request(look):
    trace = json.loads(look("01_matmul_add/64_bf16_cold_schedule-0-0-3_eager")["text"])
    [request] = [e for e in trace["traceEvents"] if e.get("name") == "Activity Buffer Request"]
    facts = look("01_matmul_add/64_bf16_cold_schedule-0-0-3_eager")
    gemm = next(e for e in facts["events"] if e["name"] == "aten::mm")
    return request["dur"] > 1000, (
        f"one, {request['dur'] / 1e3:.1f} ms, in a step of {facts['steps'][0]['recorded'] / 1e6:.0f} ms, "
        f"{gemm['dur'] / 1e6:.0f} ms of which are the first aten::mm; the next step takes "
        f"{facts['steps'][1]['recorded'] / 1e6:.1f} ms")


def kernel_varies(look):
    gemm = look("01_matmul_add/4096_bf16_warm_schedule-0-0-20_eager")["kernels"][0]
    least, most = gemm["min_ns"], gemm["max_ns"]
    compiled, by_hand = (look(f"01_matmul_add/4096_bf16_warm_{v}")["kernels"][0] for v in ("compile", "addmm"))
    other = "the same kernel" if compiled["name"] == by_hand["name"] else "another kernel"
    return most > 1.3 * least, (
        f"20 steps, {us(least)} to {us(most)}, {most / least:.2f} times; {other} in two variants of one "
        f"process, compile and addmm: {us(compiled['median_ns'])} and {us(by_hand['median_ns'])}")


def batch_is_bmm(look):
    eager, compiled, by_hand = ([row["op"] for row in look(f"01_matmul_add/1024_bf16_warm_batch-8_{v}")["kernels"]]
                                for v in ("eager", "compile", "addmm"))
    return eager == ["aten::bmm", "aten::add"], (
        f"{' and '.join(eager)}; compiled {' and '.join(compiled)}, by hand {' and '.join(by_hand)}")


def addmm_by_hand(look):
    ran, steps = zip(*(([row["name"] for row in facts["memory"] + facts["kernels"]], facts["unprofiled_ns"])
                       for facts in map(look, (f"01_matmul_add/64_bf16_warm_{v}" for v in ("addmm", "compile")))))
    return ran[0] == ran[1] and steps[0] < steps[1], (
        f"the same copy and GEMM, in steps of {us(steps[0])} by hand and {us(steps[1])} compiled")


def mode_for_the_cpu(look):
    small, graph = (look(f"03_simple_mlp/1_16_768_3072_{v}") for v in ("compile", "mode-reduce-overhead_compile"))
    calls = [launches(facts) for facts in (small, graph)]
    return calls[1] < calls[0], (
        f"reduce-overhead, on the MLP with 16 rows: {calls[0]} launches become {calls[1]} (in one process "
        f"each, a step took {us(small['unprofiled_ns'])} and {us(graph['unprofiled_ns'])})")


def one_kernel_by_tuning(look):
    tuned = look("01_matmul_add/4096_bf16_warm_mode-max-autotune-no-cudagraphs_compile")
    ran = [f"{row['name']} {us(row['median_ns'])}" for row in tuned["memory"] + tuned["kernels"]]
    return len(ran) == 1, f"a step runs {', '.join(ran)}"


def compile_per_shape(look):
    second, third = look("03_kernels_mlp/64_128-192-256_768_3072_compile")["steps"][1:]
    return third["recorded"] > 0.1 * second["recorded"], (
        f"the second length compiled again, for any length: {second['recorded'] / 1e6:,.0f} ms; "
        f"the third did not: {third['recorded'] / 1e6:.1f} ms")


CLAIMS = [
    ("01 at 64 is overhead-bound, the GPU idles", "2.314 ms, kernels 23.1 µs, ~98% idle", idle_at_64),
    ("01 at 4096 is compute-bound, the GEMM on top", "4.908 ms, kernels 4.495 ms", busy_at_4096),
    ("the first recorded step is the widest", "#2", first_step_is_wide),
    ("... since it is cold: a warm run has none", "cold run only", only_when_cold),
    ("a wait before aten::matmul in step #2", "228 µs, then 5.5, 4.5", wait_before_matmul),
    ("matmul > mm > launch, add > launch", "yes", dispatch_chain),
    ("aten::mm asks for the occupancy before it launches", "yes", occupancy_query),
    ("compiled, 01 is a copy of the bias and one addmm", "copy ~33 µs", compiled_to_addmm),
    ("... and that GEMM is the kernel of eager", "yes", same_gemm_in_addmm),
    ("compile adds four rows on the CPU", "yes", dynamo_rows),
    ("... and takes more of the CPU's time per step", "0.07 to 0.1 ms", cpu_pays),
    ("nn.Linear: aten::t launches nothing", "0 µs", transpose_is_free),
    ("nn.Linear adds the bias in the GEMM's epilogue", "yes, one kernel", bias_in_epilogue),
    ("compiled, nn.Linear is the same kernel", "byte for byte", linear_compiles_to_itself),
    ("the kernel's name tells the operands' layout", "tn", layout_in_name),
    ("the MLP is exactly five kernels", "5", five_kernels),
    ("gate and up run one kernel, down another", "0.19, 0.19, 0.17 ms", two_gemm_kernels),
    ("views launch nothing", "0 µs", views_launch_nothing),
    ("compile keeps the GEMMs and fuses gelu and mul", "89.4 µs", fused_by_inductor),
    ("... which saves a trip to memory and back", "50 MB tensor", traffic_saved),
    ("Liger: one kernel by hand, no Dynamo", "92.8 µs", liger_by_hand),
    ("... a little slower than Inductor's", "1.04 times", liger_beside_inductor),
    ("schedule 0 0 3 shows an Activity Buffer Request", "~2.5 ms", buffer_request),
    ("one kernel's duration varies from step to step", "~580 µs, outliers", kernel_varies),
    ("a batch axis turns aten::mm into aten::bmm", "yes", batch_is_bmm),
    ("torch.addmm by hand is what compile makes", "left to the reader", addmm_by_hand),
    ("a mode spares the CPU launches", "left to the reader", mode_for_the_cpu),
    ("max-autotune makes 01 at 4096 one kernel", "a wish", one_kernel_by_tuning),
    ("each new shape costs a compile", "yes", compile_per_shape),
]


@functools.cache
def looker(folder):
    """A function that gives read.py's facts of a trace below folder, with its CPU's events and its
    text. Where sizes take turns, they are those of the last step; "steps" has all."""
    @functools.cache
    def look(name):
        path = folder / f"{name}.json"
        facts = read.read(str(path))
        if facts["lesson"]["arguments"].get("sizes", 1) > 1:
            last = facts["steps"][-1]["name"].partition("#")[2]
            facts = read.read(str(path), last) | {"steps": facts["steps"]}
        return facts | {"events": read.load(str(path))["cpu"], "text": path.read_text("utf-8")}
    return look


def launches(facts):
    """How often the CPU gave the GPU work in the last step: launches, copies and memsets."""
    return sum(bool(re.search("Launch|Memcpy|Memset", e["name"])) for e in facts["events"]
               if e["cat"] in read.LAUNCH
               and [*read.ancestors(e)][-1]["name"] == facts["steps"][-1]["name"])


def held(check, look):
    """check(look), or False where the traces lack what it looks for: another GPU, other kernels."""
    try:
        return check(look)
    except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        return False, f"the traces lack what it looks for ({type(error).__name__})"


# ---- The documents -----------------------------------------------------------------------------


def output():
    """What 03_kernels_mlp printed: the command, the first variant, and the table."""
    printed = (REFERENCE / "03_kernels_mlp/output.txt").read_text("utf-8").split("\n$ ")[0].split("\n\n")
    [last] = [text for text in printed if text.startswith("One step")]
    return "```text\n" + "\n\n".join([*printed[:2], last]) + "\n```"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def claims():
    """Each claim of the posts: on the A100, and on the H200 with what its traces show."""
    found = [(claim, a100, *held(check, looker(REFERENCE))) for claim, a100, check in CLAIMS]
    return table(["claim", "A100, the posts", "H200", "what the H200's traces show"],
                 [(claim, a100, "yes" if holds else "**no**", shown) for claim, a100, holds, shown in found])


def sizes():
    """01, eager and warm, by size: where launches cease to bound the step."""
    names = [path.stem for path in REFERENCE.glob("01_matmul_add/*_bf16_warm_eager.json")]
    rows = []
    for name in sorted(names, key=lambda name: int(name.split("_")[0])):
        facts = looker(REFERENCE)(f"01_matmul_add/{name}")
        step, busy = facts["unprofiled_ns"], facts["kernels_ns"]
        rows.append((name.split("_")[0], us(step), us(busy), f"{step / busy:.2f}", facts["verdict"]["bound"]))
    return table(["size", "step, no profiler", "its kernels", "step / kernels", "bound by"], rows)


def variants():
    """The four variants of the MLP: what a step launches, moves and takes."""
    rows = []
    for variant in "eager", "compile", "liger", "fused":
        facts = looker(REFERENCE)(HAND + variant)
        moved = sum(row["bytes"] for row in facts["kernels"])
        rows.append((variant, len(facts["kernels"]), len(facts["memory"]), f"{moved / 1e6:.0f} MB",
                     us(facts["kernels_ns"]), us(facts["unprofiled_ns"]), f"{facts['lesson']['error']:.1e}"))
    return table(["variant", "kernels", "memsets", "kernels read and write", "kernels take",
                  "step, no profiler", "error against float64"], rows)


def bench():
    """The fused kernel beside the others, from the committed benchmark."""
    found = json.loads((REFERENCE / "bench_fused.json").read_text("utf-8"))
    part, step, best = found["part"], found["step"], found["best_compile_us"]
    rows = [(name, f"{part[name]['us']:.1f} µs", f"{step[name]['us']:.1f} µs" if name in step else "",
             f"{step[name]['launch_us']:.0f} µs" if name in step else "")
            for name in ("eager", "liger", "compile", "fused", "cublas")]
    others = [max(run[key]["compile"]["us"] for run in found["compile_processes"]) for key in ("part", "step")]
    tuned = [found["max_autotune"][key]["compile"]["us"] for key in ("part", "step")]
    rows[3:3] = [(f"compile, {what}", f"{part_us:.1f} µs", f"{step_us:.1f} µs", "") for what, part_us, step_us in (
        (f"best of {len(found['compile_processes'])} fresh processes", best["part"], best["step"]),
        (f"worst of {len(found['compile_processes'])} fresh processes", *others),
        ("max-autotune-no-cudagraphs, one fresh process", *tuned))]
    return table(["variant", "gate + up + GeGLU", "whole step", "CPU, to launch a step"], rows)


def savings():
    """What the fused kernel saves."""
    eager, fused = looker(REFERENCE)(HAND + "eager"), looker(REFERENCE)(HAND + "fused")
    bytes_of = lambda facts: sum(row["bytes"] for row in facts["kernels"])
    return (
        f"A step launches {len(eager['kernels']) - len(fused['kernels'])} kernels and "
        f"{len(eager['memory']) - len(fused['memory'])} memsets fewer than eager and moves {bytes_of(eager) / 1e6:.0f} MB - "
        f"{bytes_of(fused) / 1e6:.0f} MB = {(bytes_of(eager) - bytes_of(fused)) / 1e6:.0f} MB less.")


def distance():
    """How far the fused kernel is from what the GPU could do, and what its first call costs."""
    fused = looker(REFERENCE)(HAND + "fused")
    ours = fused["kernels"][0]
    found = json.loads((REFERENCE / "bench_fused.json").read_text("utf-8"))
    part = {name: row["us"] for name, row in found["part"].items()}
    rate = {name: ours["flop"] / part[name] / 1e6 for name in ("fused", "cublas")}
    first = {name: median(run["first_call_s"][name] for run in found["compile_processes"])
             for name in ("fused", "liger", "compile")}
    return (
        f"What remains is arithmetic: {ours['flop'] / 1e9:.1f} GFLOP take at least "
        f"{ours['flop'] / fused['peaks'][0] / 1e6:.0f} µs at the H200's dense peak of "
        f"{fused['peaks'][0]:.0f} TFLOP/s. The fused kernel takes {part['fused']:.0f} µs "
        f"({rate['fused']:.0f} TFLOP/s), cuBLAS {part['cublas']:.0f} µs ({rate['cublas']:.0f} TFLOP/s) "
        f"for the GEMM alone. The first call of a process costs {first['fused']:.1f} s for fused, "
        f"{first['liger']:.1f} s for Liger and {first['compile']:.1f} s for compile "
        f"(medians of {len(found['compile_processes'])} processes); fused then compiles nothing for a new batch or "
        "sequence length.")


def modes():
    """What each mode of torch.compile launches and takes, beside eager and torch.addmm."""
    rows = []
    for lesson, trace, first in (
            ("01, size 64", "01_matmul_add/64_bf16_warm_", ["eager", "addmm"]),
            ("01, size 4096", "01_matmul_add/4096_bf16_warm_", ["eager", "addmm"]),
            ("MLP, 16 rows", "03_simple_mlp/1_16_768_3072_", ["eager"]),
            ("MLP, 8192 rows", "03_simple_mlp/64_128_768_3072_", ["eager"])):
        for variant in [*first, "compile", *(f"mode-{mode}_compile" for mode in (
                "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"))]:
            if (REFERENCE / f"{trace}{variant}.json").exists():
                facts = looker(REFERENCE)(trace + variant)
                copied = sum(row["median_ns"] for row in facts["kernels"] if row["op"] == "aten::_foreach_copy_")
                rows.append((lesson, variant.replace("mode-", "").replace("_compile", ""), launches(facts),
                             us(copied) if copied else "", us(facts["gpu_ns"]), us(facts["unprofiled_ns"])))
    return table(["lesson", "variant or mode", "launches, copies, memsets by the CPU", "inputs copied for a graph",
                  "the GPU is busy", "step, no profiler"], rows)


def lengths():
    """What a step took in which a size was new, and the one after, with the profiler."""
    rows = []
    for name, new in ("64_128-192-256_768_3072", "seq 192"), ("64_128_768_3072-2048", "hidden 2048"):
        for variant in "eager", "compile", "liger", "fused":
            if (REFERENCE / f"03_kernels_mlp/{name}_{variant}.json").exists():
                steps = looker(REFERENCE)(f"03_kernels_mlp/{name}_{variant}")["steps"]
                rows.append((new, variant, *(f"{step['recorded'] / 1e6:,.1f} ms" for step in steps)))
    return table(["new in the second step", "variant", "#2", "#3", "#4"], rows)


def launch_table():
    """How Inductor launches its fused kernel, of one source, in several traces."""
    rows = []
    for when, name in (("03_simple, compile alone in a process", "03_simple_mlp/64_128_768_3072_compile"),
                       ("03_kernels, compile after eager", "03_kernels_mlp/64_128_768_3072_compile"),
                       ("03_simple, max-autotune-no-cudagraphs",
                        "03_simple_mlp/64_128_768_3072_mode-max-autotune-no-cudagraphs_compile"),
                       ("03_simple, max-autotune", "03_simple_mlp/64_128_768_3072_mode-max-autotune_compile")):
        [row] = [row for row in looker(REFERENCE)(name)["kernels"] if row["name"].startswith("triton_poi_fused")]
        blocks, threads = row["grid"][0], row["block"][0]
        rows.append((when, f"{blocks} x {threads}", f"{8192 * 3072 / blocks / threads:g}", us(row["median_ns"])))
    return table(["trace", "blocks x threads", "elements a thread", "takes"], rows)


def tuning():
    """What Inductor's tuner timed, from the step in which the trace shows it at work."""
    trace = read.load(str(REFERENCE / "03_kernels_mlp/64_128-192-256_768_3072_compile.json"))
    tries = {}
    for copy, kernel in zip(trace["gpu"], trace["gpu"][1:]):
        if copy["cat"] == "gpu_memcpy" and kernel["name"].startswith("triton_poi_fused"):
            wait = kernel["ts"] - copy["ts"] - copy["dur"]
            launch = f"{kernel['args']['grid'][0]} x {kernel['args']['block'][0]}"
            tries.setdefault(launch, []).append((copy["dur"], wait, kernel["dur"]))
    return table(["blocks x threads", "tries", "copy", "wait for the CPU", "kernel"], [
        (launch, len(found), *(us(median(column)) for column in zip(*found)))
        for launch, found in tries.items()])


def by_size():
    """Fused over eager, a whole step, for rows = batch * seq and hidden."""
    found = json.loads((REFERENCE / "bench_fused.json").read_text("utf-8"))["steps_by_size"]
    sizes = [tuple(map(int, name.split("x"))) for name in found]
    ratio = {size: f"{row['fused/eager']:.2f}" for size, row in zip(sizes, found.values())}
    columns = sorted({(dim, hidden) for _, dim, hidden in sizes})
    return table(["rows"] + [f"dim {dim}, hidden {hidden}" for dim, hidden in columns],
                 [[rows] + [ratio.get((rows, *column), "") for column in columns]
                  for rows in sorted({rows for rows, *_ in sizes})])


def answers():
    """The answers to the README's exercises."""
    look = looker(REFERENCE)
    eager, fused = look(MLP + "eager"), look(MLP + "compile")["kernels"][2]
    pointwise = sum(row["median_ns"] for row in eager["kernels"][2:4])
    gemm, add = look("01_matmul_add/64_bf16_warm_eager")["kernels"]
    return "\n".join([
        f"1. gelu and mul. Together they take {us(pointwise)}, {pointwise / eager['kernels_ns']:.0%} of what "
        "the kernels take, for little arithmetic: they only move memory.",
        f"2. `{fused['name']}`, {us(fused['median_ns'])}, grid {fused['grid']}, block {fused['block']}; "
        f"the arrow comes from `{fused['launch']}`, in the row of the same name.",
        f"3. {us(gemm['median_ns'])} and {us(add['median_ns'])}, and between them the GPU waits "
        f"{us(add['gap_ns'])}: the CPU is still on its way to the second launch."])


def catalogue():
    """One row for each reference trace."""
    rows = []
    for path in sorted(REFERENCE.glob("0*/*.json")):
        name = path.relative_to(REFERENCE).with_suffix("")
        facts = looker(REFERENCE)(str(name))
        rows.append((f"[{name}](h200/{name}.json)", len(facts["kernels"]), len(facts["memory"]),
                     us(facts["kernels_ns"]), us(facts["unprofiled_ns"]) if facts["unprofiled_ns"] else "",
                     facts["verdict"]["bound"] or "cannot tell" if facts["unprofiled_ns"] else ""))
    return table(["trace", "kernels", "memory operations", "its kernels", "step", "bound by"], rows)


DOCS = {"README.md": [output, answers, sizes, variants, savings, bench, distance, by_size, modes, lengths, launch_table,
                      tuning, claims], "traces/README.md": [catalogue]}


def docs(path):
    """The document at path, each part between <!-- NAME --> and <!-- end --> written anew."""
    text = (ROOT / path).read_text("utf-8")
    for part in DOCS[path]:
        head, rest = text.split(f"<!-- {part.__name__} -->\n")
        text = f"{head}<!-- {part.__name__} -->\n{part()}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--docs", action="store_true", help="only bring the READMEs up to date")
    if parser.parse_args().docs:
        try:
            for path, text in [(path, docs(path)) for path in DOCS]:
                (ROOT / path).write_text(text, "utf-8")
        except (read.BadTrace, OSError) as error:
            sys.exit(f"record.py: {error}")
        return
    import torch
    if not torch.cuda.is_available():
        sys.exit("record.py: PyTorch finds no GPU here, and a reference trace shows one.")
    gpu = short_name(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        shutil.copytree(Path(folder, "traces"), ROOT / "traces" / gpu, dirs_exist_ok=True)
    print(f"\nRecorded traces/{gpu}. Claims of the posts that do not hold here:")
    for claim, a100, check in CLAIMS:
        holds, shown = held(check, looker(ROOT / "traces" / gpu))
        if not holds:
            print(f"  {claim} ({a100} on the A100): {shown}")


if __name__ == "__main__":
    main()

"""Times the fused kernel of 03_kernels_mlp.py beside everything that computes the same on this GPU.

    python tests/bench_fused.py --out traces/h200

prints tables and writes OUT/bench_fused.json. "part" is gate + up + GeGLU, "step" the whole MLP.

How it measures: blocks of launches between two synchronizations, a few milliseconds each, in turns
by all variants of one process, the median of the blocks. Successive launches use other inputs and
weights, together more than the L2 holds. "launch" is the CPU's share of a call, until it returns.
After each block the GPU rests for twice the block's time; the "sustained" figures are without that
rest: there the GPU reaches its power limit and lowers its clock. What compile chooses varies from
process to process, so its figure is the best of several, each with caches of its own.

Tried on an H200 (torch 2.11, Triton 3.6, bf16, the posts' size, part only, by replaying graphs of
five launches on five sets of inputs, all variants in turns; µs, medians of 9 and of 25 rounds):

                                                                       rested  sustained
    LARGE as it is                                                      113.8      125.8
      one bare cuBLAS GEMM of the same size, for comparison             111.7      131.7
      without GELU (wrong: what the GEMM alone takes)                   107.3      119.4
      tanh.approx (one instruction less; wrong where GELU is small)     111.3      123.9
      exp2 and a division in place of rsqrt squared                     115.2      128.1
      result stored through pointers                                    115.8      131.8
      descriptors made by the kernel                                    115.4      129.3
      both                                                              116.1      132.8
      128x256 tiles, 8 warps, one program a multiprocessor              114.0      137.3
      loads and stores through pointers, not flattened                  129.5      152.0
      the same with 128x256 tiles, 8 warps                              128.9      157.6

The same in earlier runs, where the 128x256 tile with exp2 (124.4 there) was the reference:

      flatten=False                                                     140.2
      one tile a program, not flattened / flattened                     136.4, 138.0
      4 stages / 7 stages of 32 / 2 stages of 128                       129.5, 126.0, 157.6
      epilogue in two halves, 3 / 4 stages                              128.8, 129.3
      rows interleaved one by one: same math / tl.sigmoid               125.0, 117.3 to 129.9
      groups of 1, 2, 4, 16, 32, 64 tiles in place of 8                 125.1 to 126.4
      256x128 tiles, 8 warps                                            122.0
      128x128 tiles, 4 warps, two programs                              122.2
        flatten=False / 2 stages / 5 stages of 32                       136.5, 155.5, 151.8
        8 warps: two programs / one with 4 stages                       129.8, 141.7
      64x256 tiles, 4 warps, two programs, 2 stages                     159.1
    and where it took 133.9 (a hotter GPU):
      two tl.dot, gate and up apart, flattened, 8 warps                 184.4
      two tl.dot, warp_specialize=True, descriptors made by the kernel  NaN in the result
    few rows of x, through graphs: 16 x 768 x 3072, 16 x 768 x 14336, 16 x 4096 x 14336
      eager                                                             12.4, 19.9, 66.4
      SMALL as it is                                                     6.6, 16.4, 65.1
      LARGE, descriptors made by the kernel                             10.6, 25.6, 120.2
      64x128 tiles, 4 stages, descriptors made by the kernel             8.5, 18.2, 73.2
    Triton 3.6 compiles neither warp_specialize=True on the interleaved kernel nor num_ctas=2.

What fused_geglu costs the CPU (another machine, the CUDA driver replaced by a stub, torch 2.11,
Triton 3.6; µs, medians of 25 rounds):

    SMALL / LARGE as it is                                             7.2, 14.8
    an autograd.Function, x reshaped and out viewed, dearer checks    20.3, 28.7
    SMALL with x reshaped and out viewed / with geglu_gemm[grid]      10.1, 12.1
    SMALL with kernel.run, Triton's own call, past its launch hooks    5.4
    LARGE with the weight's descriptor kept between calls             13.5
"""
import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "03_kernels_mlp.py"
POSTS = dict(rows=64 * 128, dim=768, hidden=3072)
ROWS, HIDDEN = (16, 64, 256, 1024, 4096, 16384, 65536), (2048, 3072, 8192, 14336)
FIGURES = "part", "step", "part_sustained", "step_sustained"
WIDE = [(rows, 4096, 14336) for rows in (16, 64, 256, 1024, 4096)]  # an 8B model's MLP


def load_script():
    spec = importlib.util.spec_from_file_location("kernels_mlp", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def variants(script):
    """name -> (part, step), functions of one of `inputs`' tuples."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def step(part):
        return lambda x, gate, up, gate_up, down: F.linear(part(x, gate, up, gate_up), down)

    def eager(x, gate, up, *_):
        return F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)

    def liger(x, gate, up, *_):
        return LigerGELUMulFunction.apply(F.linear(x, gate), F.linear(x, up))

    def fused(x, gate, up, gate_up, *_):
        return script.fused_geglu(x, gate_up)

    return {part.__name__: (part, step(part)) for part in (eager, liger, fused)}


def compiled(fns, mode=None):
    return tuple(torch.compile(fn, mode=mode) for fn in fns["eager"])


def inputs(script, rows, dim, hidden):
    """Tuples of x, gate, up, gate and up interleaved, down."""
    def make(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)

    size = 2 * (rows * (dim + hidden) + 3 * hidden * dim)
    sets = []
    for _ in range(min(16, max(2, round(150e6 / size)))):
        gate, up = make(hidden, dim, scale=dim**-0.5), make(hidden, dim, scale=dim**-0.5)
        down = make(dim, hidden, scale=hidden**-0.5)
        sets.append((make(rows, dim), gate, up, script.interleave(gate, up), down))
    return sets


def check(fns, script, rows, dim, hidden):
    """Relative errors of the steps against float64, on inputs of their own."""
    one = inputs(script, rows, dim, hidden)[0]
    exact = fns["eager"][1](*(t.double() for t in one))
    errors = {name: ((fn(*one).double() - exact).norm() / exact.norm()).item()
              for name, (_, fn) in fns.items()}
    assert max(errors.values()) <= errors["eager"] * 1.01, errors
    return errors


def race(fns, sets, seconds, rest=2.0):
    """name -> median µs a call, median µs until a call returns, how often measured."""
    def block(fn, calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            fn(*sets[i % len(sets)])
        returned = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        while time.perf_counter() < end + rest * (end - start):  # awake: a CPU that slept is slow
            pass
        return (end - start) / calls * 1e6, (returned - start) / calls * 1e6

    for fn in fns.values():
        block(fn, 3)
    calls = {name: max(3, min(100, int(3000 / block(fn, 3)[0]))) for name, fn in fns.items()}
    blocks, end = {name: [] for name in fns}, time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, blocks.values())) < 5:
        for name, fn in fns.items():
            blocks[name].append(block(fn, calls[name]))
    result = {}
    for name, pairs in blocks.items():
        us, launch = (round(statistics.median(column), 2) for column in zip(*pairs))
        result[name] = dict(us=us, launch_us=launch, blocks=len(pairs), calls=calls[name])
    return result


def races(fns, sets, seconds):
    part, step = ({name: fn[i] for name, fn in fns.items()} for i in (0, 1))
    part["cublas"] = lambda x, gate, up, gate_up, down: F.linear(x, gate_up)  # a yardstick
    return dict(part=race(part, sets, seconds), step=race(step, sets, seconds),
                part_sustained=race(part, sets, seconds / 2, rest=0),
                step_sustained=race(step, sets, seconds / 2, rest=0))


def fresh_process(mode):
    """What a child measures: first calls with empty caches, and compile's choice in a race."""
    import torch._inductor.compile_fx  # noqa: F401, or the first call would pay for it
    script = load_script()
    print("ready", flush=True)
    input()  # the parent says when the GPU is free
    fns, sets, first = variants(script), inputs(script, **POSTS), {}
    fns["eager"][1](*sets[0])  # CUDA's and cuBLAS's own start belong to no variant
    fns["compile"] = compiled(fns, mode)
    for name in ("fused", "liger", "compile"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fns[name][1](*sets[0])
        torch.cuda.synchronize()
        first[name] = round(time.perf_counter() - start, 3)
    check(fns, script, **POSTS)
    both = {name: fns[name] for name in ("compile", "fused")}
    return dict(first_call_s=first, **races(both, sets, 0.4))


def start(mode):
    cache = tempfile.mkdtemp(prefix="bench_fused_")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    return subprocess.Popen([sys.executable, __file__, "--fresh-process", mode], env=env, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def show(title, rows):
    print(f"\n{title}")
    for name, row in rows.items():
        cells = (f"{key} {value}" for key, value in row.items())
        print(f"  {name:32}", *cells, sep="  ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "traces" / "h200")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for compile")
    parser.add_argument("--no-autotune", action="store_true", help="leave out max-autotune")
    parser.add_argument("--fresh-process", metavar="MODE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.fresh_process:
        print(json.dumps(fresh_process(args.fresh_process)))
        return
    modes = ["default"] * args.processes + ["max-autotune-no-cudagraphs"] * (not args.no_autotune)
    children, began = [start(mode) for mode in modes], time.time()

    script = load_script()
    for child in children:  # the CPU is to be quiet before anything is timed
        child.stdout.readline()
    result = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__,
                  triton=script.triton.__version__, **POSTS)

    def save(**more):
        result.update(more)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_fused.json").write_text(json.dumps(result, indent=1) + "\n")

    fns, sets = variants(script), inputs(script, **POSTS)
    fns["compile"] = compiled(fns)
    save(errors=check(fns, script, **POSTS), **races(fns, sets, 3))
    for key in FIGURES:
        show(f"{key}, us", result[key])
    del fns["compile"], sets

    table = {}
    for size in [(rows, 768, hidden) for rows in ROWS for hidden in HIDDEN] + WIDE:
        if size[0] <= 4096:  # float64 takes its time
            check(fns, script, *size)
        steps = {name: step for name, (_, step) in fns.items()}
        steps = race(steps, inputs(script, *size), 0.1)
        row = {name: r["us"] for name, r in steps.items()}
        row |= {f"{name}_launch": r["launch_us"] for name, r in steps.items()}
        row["fused/eager"] = round(row["fused"] / row["eager"], 3)
        table["x".join(map(str, size))] = row
        torch.cuda.empty_cache()
    save(steps_by_size=table)
    show("step by rows x dim x hidden, us", table)
    print(f"\n{time.time() - began:.0f} s", flush=True)

    fresh = []
    for mode, child in zip(modes, children):
        out, _ = child.communicate("go\n")
        if child.returncode:
            sys.exit(f"the process for mode {mode} failed with exit code {child.returncode}")
        one = json.loads(out.splitlines()[-1])
        show(mode, {key: {name: value["us"] if isinstance(value, dict) else value
                          for name, value in row.items()} for key, row in one.items()})
        if mode != "default":
            save(max_autotune=one)
            continue
        fresh.append(one)
        best = {key: min(run[key]["compile"]["us"] for run in fresh) for key in FIGURES}
        ratios = {"slowest size": max(row["fused/eager"] for row in table.values())}
        for key in FIGURES:
            us = {name: r["us"] for name, r in result[key].items()}
            ratios[f"{key} fused / best compile"] = round(us["fused"] / best[key], 3)
            ratios[f"{key} fused / eager"] = round(us["fused"] / us["eager"], 3)
        save(compile_processes=fresh, best_compile_us=best, ratios=ratios)
    show("ratios", {key: {"is": value} for key, value in result["ratios"].items()})
    print(f"\n{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()

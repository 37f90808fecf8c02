# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11",
#     "numpy>=1.26",
#     "triton>=3.6; sys_platform == 'linux'",
#     "liger-kernel>=0.8; sys_platform == 'linux'",
# ]
# ///
"""Profile a GeGLU MLP eager, compiled, and with Triton kernels written by hand: Liger's and ours.

    python 03_kernels_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072
    python 03_kernels_mlp.py --liger       this variant only; also --eager, --compile, --fused
    python 03_kernels_mlp.py --seq 128 192 256          lengths in turn: what is compiled again?

You will learn how a hand-written kernel looks in a trace (no Dynamo rows, no guards, one launch);
that Liger's and Inductor's kernels do the same work, gelu and mul in one pass over memory; and what
they leave: both GEMMs' outputs still go to memory and come back. Ours keeps them in registers.
Guess first: how many kernels does each variant launch in a step, and which operator launches them?
"""
import argparse
import bisect
import contextlib
import copy
import fnmatch
import functools
import itertools
import json
import logging
import math
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, record_function

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:     # no Triton for this system, a Mac say: the other variants still run
    triton = None

# Your guess: the operators that reach the device in one step, in order. These lists are right, so
# write your own before you look. A * stands for any text, as the compiler makes up its names.
GUESS = {
    "eager": ["aten::mm", "aten::mm", "aten::gelu", "aten::mul", "aten::mm"],
    "compile": ["aten::mm", "aten::mm", "*fused*gelu*mul*", "aten::mm"],
    "liger": ["aten::mm", "aten::mm", "LigerGELUMulFunction", "aten::mm"],
    "fused": ["FusedGeGLU", "aten::mm"],
    # With flags: the last line counts whose flags are all in use.
    "compile --mode": ["aten::_foreach_copy_", "Torch-Compiled*"],
    "compile --mode max-autotune-no-cudagraphs": ["*mm*", "*mm*", "*fused*gelu*mul*", "*"],
}


class SimpleGeGLUMLP(nn.Module):
    """x [..., dim] to down_proj(gelu(gate_proj(x)) * up_proj(x)) [..., dim]; no biases."""

    def __init__(self, dim, hidden, device=None, dtype=None):
        super().__init__()
        like = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(dim, hidden, **like)
        self.up_proj = nn.Linear(dim, hidden, **like)
        self.down_proj = nn.Linear(hidden, dim, **like)

    def forward(self, x):
        g = self.gate_proj(x)                   # GEMM, writes g [..., hidden]
        u = self.up_proj(x)                     # GEMM, writes u [..., hidden]
        h = F.gelu(g, approximate="tanh")       # reads g, writes h: memory traffic, little else
        m = h * u                               # reads h and u, writes m: the same again
        return self.down_proj(m)                # GEMM, reads m


def liger_mlp(mlp):
    """liger-kernel's own LigerGEGLUMLP with the weights of mlp. Raises ImportError without it."""
    from liger_kernel.transformers import LigerGEGLUMLP

    dim, hidden = mlp.gate_proj.in_features, mlp.gate_proj.out_features
    liger = LigerGEGLUMLP(SimpleNamespace(hidden_size=dim, intermediate_size=hidden))
    liger.load_state_dict(mlp.state_dict())
    return liger.to(mlp.gate_proj.weight)


if triton:

    @triton.jit
    def gelu_tanh(x):
        # 0.5 x (1 + tanh(t)) == x sigmoid(2 t) == x / (1 + 2 ** (-2 log2(e) t)), with
        # t = sqrt(2 / pi) (x + 0.044715 x ** 3). rsqrt squared divides in one instruction,
        # `/` would first look for divisors above 2 ** 126. Inf and NaN come out as in PyTorch.
        r = tl.rsqrt(1 + tl.exp2(x * (-2.302208198 - 0.10294324 * x * x)))
        return x * r * r

    @triton.jit
    def at(matrix, row, col, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
        # Pointers to a tile of a [rows, cols] matrix, and which of them lie inside it
        i, j = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
        inside = (row + i < rows) & (col + j < cols)
        return matrix + row.to(tl.int64) * cols + col + i * cols + j, inside

    @triton.jit(do_not_specialize=["M", "N", "K"])  # one compilation serves every size
    def geglu_gemm(x, w, out, M, N, K, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr):
        N, K = N // 8 * 8, K // 8 * 8  # tells the compiler that rows begin at 16 bytes
        rows, cols = tl.cdiv(M, BM), tl.cdiv(2 * N, BN)
        # Persistent: only as many programs as the GPU holds at once, each takes tile after tile.
        # flatten fuses both loops into one, so the next tile's loads start before this one ends.
        for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=TMA):
            # Eight tiles down, then one to the right: what runs at the same time shares the L2.
            row, col = tl.swizzle2d(tile // cols, tile % cols, rows, cols, 8)
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                if TMA:  # one thread orders a tile from the copy engine; past the edges it is 0
                    a, b = x.load([row * BM, k]), w.load([col * BN, k])
                else:
                    a = tl.load(*at(x, row * BM, k, M, K, BM, BK), 0)
                    b = tl.load(*at(w, col * BN, k, 2 * N, K, BN, BK), 0)
                acc = tl.dot(a, b.T, acc)
            # The epilogue: what happens to a result before it leaves the registers. Columns of acc
            # come in eights, gate, up, gate, up: a thread holds the same places of each eight, so
            # it has both halves of every pair, and this split moves nothing.
            gate, up = acc.reshape(BM, BN // 16, 2, 8).permute(0, 1, 3, 2).split()
            y = (gelu_tanh(gate) * up).reshape(BM, BN // 2)
            if TMA:
                out.store([row * BM, col * (BN // 2)], y)
            else:
                where, inside = at(out, row * BM, col * (BN // 2), M, N, BM, BN // 2)
                tl.store(where, y, inside)


# BM, BN, BK, stages. LARGE lets two programs share a multiprocessor: while one is in its epilogue,
# the other computes. SMALL, for little work, has more tiles, so that all multiprocessors load
# weights, and no descriptors, which cost the CPU as much as all the rest of a launch.
LARGE, SMALL = (128, 128, 64, 3), (64, 64, 64, 4)


def arguments(x, w, out, M, N, K, tma, BM, BN, BK):
    if tma:  # a descriptor tells the copy engine how a tile lies in memory
        x = TensorDescriptor(x, [M, K], [K, 1], [BM, BK])
        w = TensorDescriptor(w, [2 * N, K], [K, 1], [BN, BK])
        out = TensorDescriptor(out, [M, N], [N, 1], [BM, BN // 2])
    return x, w, out, M, N, K, tma, BM, BN, BK


@functools.cache
def kernels(device, dtype):
    """LARGE and SMALL, each compiled and the end of its `arguments`; how many programs fit."""
    gpu, compiled = torch.cuda.get_device_properties(device), []
    if torch.version.hip or gpu.major < 8:
        raise RuntimeError("fused_geglu needs an NVIDIA GPU of compute capability 8.0 or newer, "
                           f"not {gpu.name} ({gpu.major}.{gpu.minor})")
    # TMA came with 9.0. 12.x lacks the shared memory for it here.
    for (*tile, stages), tma in (LARGE, gpu.major in (9, 10)), (SMALL, False):
        args = arguments(*torch.empty(3, 16, 16, device=device, dtype=dtype), 16, 8, 16, tma, *tile)
        compiled.append((geglu_gemm.warmup(*args, num_stages=stages, grid=(1,)), tma, *tile))
    return *compiled, 2 * gpu.multi_processor_count


def fused_geglu(x, w):
    """x [..., dim], w = interleave(gate, up) -> gelu_tanh(x @ gate.T) * (x @ up.T) [..., hidden]"""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        raise RuntimeError("fused_geglu has no backward: call it under torch.no_grad()")
    if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        raise TypeError("fused_geglu takes bfloat16 or float16, the same for x and weight, "
                        f"not {x.dtype} and {w.dtype}")
    *batch, K = x.shape or [0]
    wide, depth = w.shape if w.ndim == 2 else (0, 0)
    if K != depth or K % 8 or wide % 16 or not K * wide:
        raise ValueError("fused_geglu takes x [..., dim] and weight [2 * hidden, dim], dim and "
                         f"hidden multiples of 8, not {list(x.shape)} and {list(w.shape)}")
    if (not triton or not x.is_cuda or w.device != x.device
            or x.device.index != torch.cuda.current_device()):
        raise RuntimeError("fused_geglu needs Triton, and x and weight on the current NVIDIA GPU, "
                           f"not on {x.device} and {w.device}")
    x, w = x.contiguous(), w.contiguous()  # now it is rows in memory, whatever the batch
    if x.data_ptr() % 16 or w.data_ptr() % 16:  # an odd slice: TMA cannot start there
        x, w = x.clone(), w.clone()
    M, N, (large, small, programs) = x.numel() // K, wide // 2, kernels(x.device, x.dtype)
    # Few rows, or so few multiply-adds that the GPU would wait for the CPU to write descriptors?
    kernel, tma, BM, BN, BK = small if M <= 64 or large[1] and M * wide * K < 3e9 else large
    tiles = -(-M // BM) * -(-wide // BN)
    # A row of its own in a trace, made as Inductor makes its own: an autograd.Function would cost
    # the CPU more than the launch. The compiled kernel spares it geglu_gemm[grid]'s look-up.
    with torch._C._profiler._RecordFunctionFast("FusedGeGLU", [x, w]):
        out = x.new_empty(*batch, N)
        if tiles:
            kernel[min(tiles, programs), 1, 1](*arguments(x, w, out, M, N, K, tma, BM, BN, BK))
    return out


def interleave(gate, up):
    """Two [hidden, dim] weights -> [2 * hidden, dim]: eight rows of gate, eight of up, and on."""
    return torch.stack([gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))], 1).flatten(0, 2)


class FusedGeGLUMLP(nn.Module):
    """A GeGLU MLP in two kernels, for inference in bfloat16 or float16."""

    @classmethod
    def from_mlp(cls, mlp):
        """From a SimpleGeGLUMLP or LigerGEGLUMLP. Copies gate and up, shares down_proj."""
        gate, up = mlp.gate_proj, mlp.up_proj
        if gate.bias is not None or up.bias is not None or gate.out_features % 8:
            raise ValueError("FusedGeGLUMLP takes gate_proj and up_proj without bias, with hidden "
                             f"in multiples of 8, not {gate} and {up}")
        self, grad = cls(), gate.weight.requires_grad or up.weight.requires_grad
        packed = interleave(gate.weight.detach(), up.weight.detach())
        self.gate_up, self.down_proj = nn.Parameter(packed, requires_grad=grad), mlp.down_proj
        return self

    def forward(self, x):
        return self.down_proj(fused_geglu(x, self.gate_up))


@contextlib.contextmanager
def first_call(size, device):
    """Print how long the call inside took, and what Dynamo and Triton compiled for it."""
    metrics = torch._dynamo.utils.get_compilation_metrics       # imported by build
    known, compiled, start = len(metrics()), [], time.perf_counter()
    if triton:
        triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    yield
    torch.get_device_module(device).synchronize()
    ms = (time.perf_counter() - start) * 1e3
    print("  hidden {}, seq {}: first call {:.1f} ms".format(*size, ms))
    for frame in metrics()[known:]:
        if frame.co_name:
            print(f"    Dynamo compiled {frame.co_name}, graph {frame.compile_id}, in "
                  f"{frame.dynamo_cumulative_compile_time_us / 1e3:.1f} ms")
        elif frame.recompile_reason:
            print("    Dynamo gave up, after torch._dynamo.config.recompile_limit: eager from here")
        if frame.recompile_reason:
            print(f"    since {frame.recompile_reason.partition('. Guard')[0]}")
    for name in dict.fromkeys(compiled):
        print(f"    Triton compiled {name}")


def build(variant, args):
    """The step to profile, and a function for what it should return, in float64."""
    # The seed gives every variant the same weights and the same inputs.
    torch.manual_seed(0)
    like = {"device": args.device, "dtype": DTYPES[args.dtype]}
    mlps = {hidden: SimpleGeGLUMLP(args.dim, hidden, **like).eval() for hidden in args.hidden}
    xs = {seq: torch.randn(args.batch, seq, args.dim, **like) for seq in args.seq}
    make = {"eager": lambda mlp: mlp, "liger": liger_mlp, "fused": FusedGeGLUMLP.from_mlp,
            "compile": functools.partial(torch.compile, mode=args.mode)}[variant]
    models = {hidden: make(mlp) for hidden, mlp in mlps.items()}
    # Several sizes take turns in the recorded steps, so that the trace shows what is new. Before
    # it is the first one's turn, and after it the last one's: that one is timed and checked.
    sizes = list(itertools.product(args.hidden, args.seq))
    wait, warmup, active = args.schedule
    order = itertools.chain(sizes[:1] * (3 + wait + warmup), itertools.islice(
        itertools.cycle(sizes), active), itertools.repeat(sizes[(active - 1) % len(sizes)]))
    new = {*sizes} if len(sizes) > 1 else set()
    hidden = seq = None
    if new:     # this import takes a second, which is no part of a first call
        from torch._dynamo import utils     # noqa: F401

    def step():
        nonlocal hidden, seq
        size = hidden, seq = next(order)
        watch = first_call(size, args.device) if size in new else contextlib.nullcontext()
        new.discard(size)
        with watch, record_function("kernels_mlp_fwd"):
            return models[hidden](xs[seq])

    return step, lambda: copy.deepcopy(mlps[hidden]).double()(xs[seq].double())


def unfit(variant, args):
    """Why a variant cannot run on this machine or at these sizes; None where it can."""
    if variant in ("liger", "fused") and args.device == "cpu":
        return ("a Triton kernel needs a GPU. Open the reference instead: "
                f"traces/h200/03_kernels_mlp/64_128_768_3072_{variant}.json")
    if variant == "fused" and (torch.version.hip or torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    if variant == "fused" and (args.dtype == "fp32" or args.dim % 8 or any(
            hidden % 8 for hidden in args.hidden)):
        return "takes bf16 or fp16, and dim and hidden in multiples of 8"


def main():
    parser = argparse.ArgumentParser(description="Profile a GeGLU MLP and three ways to fuse it.")
    for size, default in {"batch": 64, "dim": 768}.items():
        parser.add_argument(f"--{size}", type=positive, default=default, help=f"default: {default}")
    parser.add_argument("--seq", type=positive, nargs="+", default=[128],
                        help="default: 128. Several take turns. Look for the step in which Dynamo "
                             "compiles again, and for Liger's and fused's, in which nothing does")
    parser.add_argument("--hidden", type=positive, nargs="+", default=[3072],
                        help="default: 3072. Look also for Liger's kernel, compiled again")
    parser.set_defaults(warmup=True)
    args = parse(parser)
    args.seq, args.hidden = ([*dict.fromkeys(sizes)] for sizes in (args.seq, args.hidden))
    args.sizes = len(args.seq) * len(args.hidden)
    if args.sizes > args.schedule[2]:
        parser.error(f"{args.sizes} sizes take turns: record as many steps, "
                     f"--schedule 1 1 {args.sizes}")
    if args.sizes > 1 and args.mode in ("reduce-overhead", "max-autotune"):
        parser.error("a CUDA graph is of one size: choose one, or another --mode")
    why = {variant: unfit(variant, args) for variant in args.variants}
    for variant in filter(why.get, why):
        print(f"{variant}: {why[variant]}", file=sys.stderr)
    args.variants = [variant for variant in why if not why[variant]]
    asked = any(why[variant] and getattr(args, variant) for variant in why)
    seq, hidden = ("-".join(map(str, values)) for values in (args.seq, args.hidden))
    tag = f"{args.batch}_{seq}_{args.dim}_{hidden}"
    return run("03_kernels_mlp", tag, args) or int(asked)


# ---- What follows is the same in all four scripts. Worth copying: profile, time_step, launched -

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Operators that launch nothing: they call another operator, or only rewrite shape and strides.
IDLE = set("""linear matmul t transpose as_strided view reshape expand _unsafe_view unsqueeze
    squeeze resolve_conj resolve_neg empty empty_like empty_strided""".split())


@contextlib.contextmanager
def quiet():
    """Hold stderr back, then pass on all but what Kineto always says of its own start."""
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, re.sub(rb"(?m)^(USDT:|.*gpuGetDeviceCount failed).*\n?", b"", held.read()))


def profile(step, device, schedule=(1, 1, 3)):
    """Profile calls of step(): one waits, one warms the profiler up, three are recorded, or as many
    of each as schedule says.

    Returns the Chrome trace, a dict, and the profiler's table, a text. Raises OSError.
    """
    # Else CUPTI, which records the GPU, stays attached and slows every later launch.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    wait, warmup, active = schedule
    warnings.filterwarnings("ignore", "Profiler won't be using warmup")     # as was asked for
    phases = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with tempfile.TemporaryDirectory() as folder, quiet():
        with torch.profiler.profile(activities=activities, schedule=phases, record_shapes=True,
                                    acc_events=True) as prof:
            for _ in range(wait + warmup + active):
                step()
                prof.step()
        prof.export_chrome_trace(f"{folder}/trace.json")
        try:        # on a full disk the export writes half a file and says nothing
            trace = json.loads(Path(folder, "trace.json").read_text("utf-8"))
        except (OSError, ValueError):
            raise OSError(f"no room for a trace in {folder}") from None
    trace.pop("host_name", None)
    for event in trace["traceEvents"]:
        event.get("args", {}).pop("kernel_file", None)      # a path on this machine
    return trace, prof.key_averages().table(
        sort_by=f"self_{device}_time_total", row_limit=15, max_name_column_width=120)


def time_step(step, device):
    """µs per step without the profiler: n steps back to back between two synchronizations, over n;
    the median of seven such blocks. n is as many as fit into 0.1 s, 500 at most."""
    def block(n):
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.get_device_module(device).synchronize()
        return (time.perf_counter() - start) / n * 1e6

    n = max(1, min(500, int(100_000 / block(3))))
    return float(np.median([block(n) for _ in range(7)]))


def launched(trace, device):
    """What each recorded step launched: a list per step of (operator, its kernels and memory
    operations), in order, as the trace has them; and how many launches left no event behind.

    On a CPU the outermost operators that compute stand for kernels.
    """
    spans = sorted((e for e in trace["traceEvents"] if e["ph"] == "X" and "cat" in e),
                   key=lambda e: (e["ts"], -e["dur"]))
    host = {e["args"].get("External id"): e for e in spans
            if e["cat"] in ("cpu_op", "user_annotation")}
    work = [e for e in spans if e["cat"] in ("kernel", "gpu_memset", "gpu_memcpy")]
    calls = {e["args"].get("correlation"): e for e in spans
             if e["cat"] in ("cuda_runtime", "cuda_driver")}
    lost = {i for i in calls if "Launch" in calls[i]["name"]} - {
        e["args"].get("correlation") for e in work}
    end = 0
    for e in host.values() if device == "cpu" else []:
        library, _, name = e["name"].rpartition("::")
        if "compile_inner" in name:     # the compiler tries operators out
            end = max(end, e["ts"] + e["dur"])
        if e["ts"] >= end and (library == "aten" and name not in IDLE or "cpp_fused" in name):
            work.append(e)
            end = e["ts"] + e["dur"]
    # The operator, or at least the launch; without either it comes from before the recording.
    groups = [(op, list(events)) for op, events in itertools.groupby(work, lambda e: host.get(
        e["args"].get("External id"), calls.get(e["args"].get("correlation"))))]
    steps = [e for e in host.values() if e["name"].startswith("ProfilerStep")]
    found, starts = [[] for _ in steps], [step["ts"] for step in steps]
    for op, events in groups:
        i = bisect.bisect(starts, op["ts"]) - 1 if op else -1
        if i >= 0 and op["ts"] < starts[i] + steps[i]["dur"]:
            found[i].append((op["name"], events))
    return found, len(lost)


# ---- The screen and the command line: nothing to copy ------------------------------------------

WHY = {     # operators that a guess may name and that never reach the device
    "aten::linear": "only calls aten::mm, or aten::addmm where there is a bias",
    "aten::matmul": "only calls aten::mm",
    "aten::t": "swaps two strides: it moves no data and launches nothing",
    "aten::add": "is part of aten::addmm: the GEMM's epilogue on a GPU, a copy before it on a CPU",
    "aten::_foreach_copy_": "copies inputs for a CUDA graph, and none ran: a CPU has none",
}
CURES = {   # what to change, by a pattern in an error's text
    r"Python\.h": "Python's headers are missing: install them (apt install python3-dev)",
    r"C\+\+ compiler|find C compiler": "a C++ compiler is missing: install one (apt install g++)",
    r"of memory|can't allocate|[Oo]verflow|MemoryError": "not enough memory: choose smaller sizes",
    r"ModuleNotFoundError": "{}: pip install -r requirements.txt",
    r"File name too long": "{}: choose fewer sizes",
    r"File exists|s a directory|ot a directory": "{}: move away what is in the way of the traces",
    r"OSError|\[Errno": "{}: make room for the traces, or run in another folder",
}


def is_kernel(event):
    return event["cat"] in ("kernel", "cpu_op")


def guess(variant, flags):
    """The last line of GUESS for this variant whose flags are all in use."""
    return [GUESS[key] for key in GUESS if {*key.split()} <= {variant, *flags}][-1]


def compare(guessed, steps):
    """Print the guess beside what a step launched; return the counts and median µs of a step."""
    short = lambda name, n: name if len(name) <= n else f"{name[:n - 15]}...{name[-12:]}"
    flat = [[e for _, events in step for e in events] for step in steps]
    us = np.array([[e["dur"] for e in step] for step in flat])
    columns = [np.median(us, 0)] + [us.min(0), us.max(0)] * (len(steps) > 3)
    heads = "".join(f"{head:>9}" for head in ["µs", "min", "max"][:len(columns)])
    heads += f"{'blocks x threads':>18}" * any("grid" in e["args"] for e in flat[-1])
    print(f"  {'guess':22}{'trace':30}{heads}  kernel")
    seen = [op for op, events in steps[-1] if any(map(is_kernel, events))]
    guesses, rows = iter(guessed), zip(*columns)
    for op, events in steps[-1]:
        mine = next(guesses, "-") if any(map(is_kernel, events)) else ""
        for e in events:
            took = "".join(f"{cell:9.2f}" for cell in next(rows))
            size = [str(math.prod(e["args"].get(key, []))) for key in ("grid", "block")]
            took += f"{' x '.join(size):>18}" * (e["cat"] == "kernel")
            print(f"  {mine:22}{short(op, 29):30}{took:{len(heads)}}  {short(e['name'], 44)}")
            mine = op = ""
    for mine in guesses:
        print(f"  {mine:22}-")
    holds = len(seen) == len(guessed) and all(map(fnmatch.fnmatchcase, seen, guessed))
    print("  The guess holds." if holds else "  The guess does not hold.")
    for op in sorted(set(guessed) & set(WHY) - set(seen)):
        print(f"  {op} {WHY[op]}.")
    if "aten::_foreach_copy_" in seen:
        print("  A CUDA graph: one launch replays its kernels, after a copy of the inputs.")
    for e, least, most in zip(flat[-1], us.min(0), us.max(0)):
        if e["cat"] == "kernel" and most > 1.3 * least:
            print(f"  {short(e['name'], 44)} varies {most / least:.1f} times from step to step: "
                  f"{least:.2f} to {most:.2f} µs.")
    kernels = [[e["dur"] for e in filter(is_kernel, step)] for step in flat]
    spans = [max(e["ts"] + e["dur"] for e in step) - step[0]["ts"] for step in flat]
    return [len(kernels[-1]), len(flat[-1]) - len(kernels[-1]),
            np.median([sum(step) for step in kernels]), np.median(spans)]


def measure(variant, path, args, lesson):
    """Profile one variant, save its trace, print what it launched; return cells for the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    step, reference = build(variant, args)
    start = time.perf_counter()
    for _ in range(3 if args.warmup else 0):
        step()
        torch.get_device_module(args.device).synchronize()
        lesson.setdefault("first_call_s", round(time.perf_counter() - start, 3))
    trace, table = profile(step, args.device, args.schedule)
    y, expected = step().double(), reference()
    lesson["error"] = ((y - expected).norm() / expected.norm()).item()
    lesson["step_us"] = time_step(step, args.device)
    steps, lost = launched(trace, args.device)
    cpu = [e["dur"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"
           and e["name"].startswith("ProfilerStep")]
    # Where sizes take turns, look at the steps of the last one.
    turns = slice((len(steps) - 1) % args.sizes, None, args.sizes)
    steps, cpu = steps[turns], cpu[turns]
    seen = not lost and steps and all(steps)
    if not seen:
        lesson["notes"].append(
            f"The profiler missed kernels ({lost} launches have none), so none are counted. It "
            "needs CUPTI, which WSL2 and some drivers refuse.")
    elif len({str([e["name"] for _, events in step for e in events]) for step in steps}) > 1:
        lesson["notes"].append("The steps launched different kernels; the last one is shown.")
        steps, cpu = steps[-1:], cpu[-1:]
    trace |= {"lesson": lesson, "traceName": path.as_posix()}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:        # whole files or none
        Path(folder, "new.json").write_text(json.dumps(trace), "utf-8")
        Path(folder, "new.txt").write_text(table, "utf-8")
        for new in Path(folder).iterdir():
            new.replace(path.with_suffix(new.suffix))
    cells = compare(guess(variant, args.flags), steps) if seen else ["?"] * 4
    for note in lesson["notes"]:
        print(f"  {note}")
    return [*cells, np.median(cpu), lesson["step_us"]]


def run(script, tag, args):
    """Profile each variant, then compare all in one table. Returns the exit code."""
    gpu = args.device == "cuda"
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    tag += f"_dtype-{args.dtype}" * (args.dtype not in ("bf16", *tag.split("_")))
    tag += "_device-cpu" * (not gpu and torch.cuda.is_available())
    tag += f"_mode-{args.mode}" * ("--mode" in args.flags)
    tag += f"_schedule-{'-'.join(map(str, args.schedule))}" * ("--schedule" in args.flags)
    print(f"{script} in {args.dtype} on {device}, torch {torch.__version__}")
    arguments = {key: value for key, value in vars(args).items() if key not in GUESS}
    versions = {"torch": torch.__version__} | {
        found.name.replace("-", "_"): found.version for found in metadata.distributions()
        if found.name in ("triton", "liger-kernel", "liger_kernel")}
    rows, paths, eager = [], [], None
    for variant in args.variants:
        print(f"\n{variant}", flush=True)
        path = Path("traces", script, f"{tag}_{variant}.json")
        lesson = {"script": script, "variant": variant, "notes": [], **versions,
                  "device": device, "device_type": args.device, "arguments": arguments}
        try:
            with torch.no_grad():
                cells = measure(variant, path, args, lesson)
        except BrokenPipeError:
            raise
        except Exception as error:
            if "\nKeyboardInterrupt" in "".join(traceback.format_exception(error)):
                raise KeyboardInterrupt from None       # the profiler, stopped midway, hid it
            print(f"{script}: {variant}: {cure(error)}", file=sys.stderr)
            continue
        eager = lesson["step_us"] if variant == "eager" else eager
        rows.append([variant, *cells, f"{eager / lesson['step_us']:.2f}" if eager and gpu else "-",
                     str(lesson.get("first_call_s", "cold")), f"{lesson['error']:.1e}"])
        paths.append(path)
    if rows:
        print("\nOne step: medians, step µs without the profiler, error against float64")
        head = ",kernels,mem ops,kernels µs,span µs,CPU µs,step µs,speed-up,first call s,error"
        for row in [head.split(","), *rows]:
            print("{:8}{:>8}{:>8}{:>12}{:>10}{:>10}{:>10}{:>9}{:>13}{:>9}".format(*(
                f"{cell:,.{int(cell < 1e4)}f}" if isinstance(cell, float) else cell
                for cell in row)))
        if not gpu:
            print("On a CPU the operators that compute stand for kernels. Trust which ran, in "
                  "which order,\nand what was fused; the times vary a lot from run to run.")
        print("\nOpen a trace at https://ui.perfetto.dev; its table lies beside it (.txt):",
              *paths, sep="\n  ")
    return int(len(rows) < len(args.variants))


def cure(error):
    """One line that says what to change. An error that we do not know keeps its traceback."""
    for pattern, advice in CURES.items():
        if re.search(pattern, f"{type(error).__name__}: {error}"):
            return advice.format(error)
    traceback.print_exception(error)
    return "failed, see above"


def count(text, least=0):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def positive(text):
    return count(text, 1)


def parse(parser):
    """Add the flags that all four scripts have; settle variants, device and dtype."""
    variants = [key for key in GUESS if " " not in key]
    for variant in variants:
        parser.add_argument(f"--{variant}", action="store_true", help=f"profile {variant} only")
    parser.add_argument("--mode", choices=MODES, default="default",
                        help="torch.compile's. Look for one cudaGraphLaunch in place of all "
                             "launches, after copies of the inputs; for triton_tem, not cuBLAS")
    parser.add_argument("--schedule", nargs=3, type=count, default=[1, 1, 3],
                        metavar=("WAIT", "WARMUP", "ACTIVE"),
                        help="steps before, to warm the profiler up, recorded; default: 1 1 3. "
                             "Look for what the first steps cost in 0 0 3, and which kernels vary "
                             "in 0 0 20")
    parser.set_defaults(sizes=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    args = parser.parse_args()
    args.flags = [word for name, value in vars(args).items() if value != parser.get_default(name)
                  for word in (f"--{name}", str(value))]
    args.variants = [variant for variant in variants if getattr(args, variant)] or variants
    if "--mode" in args.flags and "compile" not in args.variants:
        parser.error("--mode is torch.compile's: add --compile")
    if not args.schedule[2]:
        parser.error("--schedule records no step: ACTIVE must be 1 or more")
    # A CPU's trace then names Inductor's C++ kernel.
    os.environ.setdefault("TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE", "1")
    # Loggers that speak of no error: no CUDA on a machine without, a candidate that does not fit.
    for name in "torch.utils.cpp_extension", "torch._inductor.select_algorithm":
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gpu = torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        sys.exit("--device cuda: PyTorch finds no GPU here; leave it out to profile the CPU")
    args.device = args.device or ("cuda" if gpu else "cpu")
    if args.device == "cuda":
        bf16, fallback = torch.cuda.is_bf16_supported(including_emulation=False), "fp16"
    else:
        cpu = torch.cpu.get_capabilities()
        bf16, fallback = cpu.get("avx512_bf16") or cpu.get("amx_bf16"), "fp32"
    if args.dtype == "bf16" and not bf16:
        args.dtype = fallback
        print(f"This {args.device} has no bf16 matmul: {fallback} is used.")
    return args


if __name__ == "__main__":
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")        # a screen without µ still gets the rest
    try:
        code = main()
        print(end="", flush=True)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:                        # whoever read the output has gone, or no room
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"output: {error.strerror}")

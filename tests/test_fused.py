"""The fused kernel of 03_kernels_mlp.py: its numbers (on a GPU, and without one in Triton's
interpreter), what it refuses, and what it compiles to on GPUs that are not at hand."""
import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

SCRIPT = Path(__file__).parents[1] / "03_kernels_mlp.py"
spec = importlib.util.spec_from_file_location("kernels_mlp", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

gpu = pytest.mark.gpu
triton = script.triton
needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
HALVES = (torch.bfloat16, torch.float16)
ints = lambda lo, hi: st.integers(lo, hi)


def case(lead, dim, hidden, dtype, device, scale=1.0):
    """Random x [*lead, dim], gate and up [hidden, dim]; gate(x) and up(x) are about scale."""
    make = lambda *shape: torch.randn(*shape, device=device)
    x, gate, up = make(*lead, dim) * scale, make(hidden, dim), make(hidden, dim)
    return x.to(dtype), (gate * dim**-0.5).to(dtype), (up * dim**-0.5).to(dtype)


def eager(x, gate, up):
    return F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)


def error(y, x, gate, up):
    """Relative error against float64 in the 2-norm."""
    exact = eager(x.double(), gate.double(), up.double())
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(eager(x, self.gate_proj.weight, self.up_proj.weight))


# ---- numbers without a GPU: the interpreter has to be chosen before the kernel is defined ----


def interpreted(x, gate, up, programs, tma, tile):
    out = torch.full((len(x), len(gate)), float("nan"), dtype=x.dtype)
    sizes = len(x), len(gate), x.shape[1]
    args = script.arguments(x, script.interleave(gate, up), out, *sizes, tma, *tile[:-1])
    script.geglu_gemm[(programs,)](*args)
    return out


@settings(max_examples=40, deadline=None)
@given(ints(1, 300), ints(1, 25), ints(1, 25), ints(1, 7), st.sampled_from((1, 30)), st.booleans(),
       st.sampled_from((script.LARGE, script.SMALL)))
@example(1, 1, 1, 1, 1, False, script.SMALL)
@example(129, 9, 9, 2, 1, False, script.LARGE)  # tails in every direction
@example(129, 9, 9, 2, 1, True, script.LARGE)
@example(1100, 1, 9, 3, 1, True, script.LARGE)  # more than one group of the swizzle
@example(1100, 1, 9, 3, 1, False, script.SMALL)
def check_in_interpreter(rows, dim8, hidden8, programs, scale, tma, tile):
    torch.manual_seed(rows)
    x, gate, up = case((rows,), 8 * dim8, 8 * hidden8, torch.float16, "cpu", scale)
    run = lambda: interpreted(x, gate, up, programs, tma, tile)
    assert error(run(), x, gate, up) < 4e-4  # eager's in fp16
    x[0], x[-1, 0] = float("nan"), float("inf")
    y, odd = run(), [0, -1]
    torch.testing.assert_close(y[odd], eager(x, gate, up)[odd], equal_nan=True, rtol=0, atol=0)
    assert y[1:-1].isfinite().all()


@needs_triton
def test_numbers_in_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


# ---- what it compiles to ----

KB = 1024
# compute capability, loads through TMA, instruction of its tensor cores, shared memory a block may
# have and that of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications")
CHIPS = [
    (80, False, "mma.sync", 163 * KB, 164 * KB),
    (86, False, "mma.sync", 99 * KB, 100 * KB),
    (89, False, "mma.sync", 99 * KB, 100 * KB),
    (90, True, "wgmma.mma_async", 227 * KB, 228 * KB),
    (100, True, "tcgen05.mma", 227 * KB, 228 * KB),
    (120, False, "mma.sync", 99 * KB, 100 * KB),
]


@needs_triton
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("size", ("LARGE", "SMALL"))
@pytest.mark.parametrize("chip, tma, instruction, block, multiprocessor", CHIPS)
def test_compiles_for(chip, tma, instruction, block, multiprocessor, size, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    BM, BN, BK, stages = getattr(script, size)
    constants = dict(TMA=tma and size == "LARGE", BM=BM, BN=BN, BK=BK)
    if constants["TMA"]:
        blocks, aligned = ((BM, BK), (BN, BK), (BM, BN // 2)), {}
        kinds = [f"tensordesc<{dtype}[{rows},{cols}]>" for rows, cols in blocks]
    else:  # what the JIT would infer: pointers divisible by 16; sizes are do_not_specialize
        kinds, aligned = [f"*{dtype}"] * 3, {(i,): [["tt.divisibility", 16]] for i in range(3)}
    signature = dict(zip(("x", "w", "out"), kinds)) | dict.fromkeys("MNK", "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = triton.compile(ASTSource(script.geglu_gemm, signature, constants, aligned),
                            target=GPUTarget("cuda", chip, 32), options=dict(num_stages=stages))
    ptx = kernel.asm["ptx"]
    assert instruction in ptx
    if constants["TMA"]:
        assert "cp.async.bulk.tensor.2d.shared" in ptx and "cp.async.bulk.tensor.2d.global" in ptx
    else:  # 16 bytes a load and a store
        assert "cp.async.cg.shared.global" in ptx and "st.global.v4.b32" in ptx
    assert kernel.metadata.shared <= block
    if multiprocessor > 100 * KB:  # two programs fit; each block has 1 KB of overhead
        assert 2 * (kernel.metadata.shared + KB) <= multiprocessor


# ---- what it refuses ----


@pytest.mark.parametrize("x, w, raises, says", [
    ((2, 16, "float32"), (32, 16, "float32"), TypeError, "bfloat16 or float16"),
    ((2, 16, "float16"), (32, 16, "bfloat16"), TypeError, "float16 and torch.bfloat16"),
    ((2, 16, "float16"), (32, 24, "float16"), ValueError, r"not \[2, 16\] and \[32, 24\]"),
    ((2, 12, "float16"), (32, 12, "float16"), ValueError, "multiples of 8"),
    ((2, 16, "float16"), (24, 16, "float16"), ValueError, "multiples of 8"),
    ((2, 0, "float16"), (16, 0, "float16"), ValueError, "multiples of 8"),
    ((2, 16, "float16"), (0, 16, "float16"), ValueError, "multiples of 8"),
    (("float16",), (32, 16, "float16"), ValueError, r"not \[\] and \[32, 16\]"),
    ((2, 16, "float16"), (16, "float16"), ValueError, "multiples of 8"),
    ((2, 16, "float16"), (2, 32, 16, "float16"), ValueError, "multiples of 8"),
    ((2, 16, "float16"), (32, 16, "float16"), RuntimeError, "not on cpu and cpu"),
])
def test_refuses(x, w, raises, says):
    x, w = (torch.zeros(shape, dtype=getattr(torch, dtype)) for *shape, dtype in (x, w))
    with pytest.raises(raises, match=says) as info:
        script.fused_geglu(x, w)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("needs", ("x", "w"))
def test_refuses_to_lose_a_gradient(needs):
    x, w = (torch.zeros(16, 16, dtype=torch.float16, requires_grad=needs == n) for n in "xw")
    with pytest.raises(RuntimeError, match="no backward"):
        script.fused_geglu(x, w)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not on cpu"):
        script.fused_geglu(x, w)


@pytest.mark.parametrize("major, minor, tma", [
    (7, 5, None), (8, 0, False), (8, 9, False), (9, 0, True), (10, 3, True), (12, 0, False)])
def test_knows_its_gpus(monkeypatch, major, minor, tma):
    chip = SimpleNamespace(major=major, minor=minor, name="Some GPU", multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    compiled = SimpleNamespace(warmup=lambda *args, num_stages, grid: num_stages)
    monkeypatch.setattr(script, "geglu_gemm", compiled, raising=False)
    ask = lambda: script.kernels.__wrapped__("cpu", torch.float16)
    if tma is None:
        with pytest.raises(RuntimeError, match=r"8.0 or newer, not Some GPU \(7.5\)"):
            ask()
    elif triton or not tma:
        assert ask() == ((3, tma, 128, 128, 64), (4, False, 64, 64, 64), 216)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        with pytest.raises(RuntimeError, match="NVIDIA"):
            ask()


class Pretender(torch.Tensor):
    """A tensor on the CPU that claims to be on the GPU."""

    is_cuda = True


@needs_triton
@pytest.mark.parametrize("lead, hidden, tma, tile, grid", [
    ((4, 16), 14336, True, "SMALL", 264),  # few rows
    ((4, 64), 3072, True, "SMALL", 264),  # little work: no time for descriptors
    ((2, 2), 64, True, "SMALL", 2),
    ((64, 128), 3072, True, "LARGE", 264),
    ((64, 128), 3072, False, "LARGE", 264),
    ((1, 65), 64, False, "LARGE", 1),  # without TMA there are no descriptors to avoid
    ((3, 0), 64, True, None, None),
])
@torch.no_grad()
def test_launch_without_gpu(monkeypatch, tmp_path, lead, hidden, tma, tile, grid):
    """What happens on the CPU in a launch: which kernel gets what, and the row in a trace."""
    calls = []

    class Kernel:
        def __init__(self, name, tma):
            self.entry = self, tma, *getattr(script, name)[:3]
            self.name = name

        def __getitem__(self, size):
            return lambda *args: calls.append((self.name, size, args))

    large, small = Kernel("LARGE", tma).entry, Kernel("SMALL", False).entry
    monkeypatch.setattr(script, "kernels", lambda device, dtype: (large, small, 264))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    x = torch.zeros(*lead, 1536, dtype=torch.float16)[..., ::2].as_subclass(Pretender)
    w = torch.zeros(2 * hidden, 768, dtype=torch.float16)
    with torch.profiler.profile(record_shapes=True) as prof:
        out = script.fused_geglu(x, w)
    assert out.shape == (*lead, hidden)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    row, = (e for e in events if e["name"] == "FusedGeGLU")
    assert row["cat"] == "cpu_op"
    assert row["args"]["Input Dims"] == [[*lead, 768], [2 * hidden, 768]]
    if not tile:
        assert not calls
        return
    (name, size, (*matrices, M, N, K, made, BM, BN, BK)), = calls
    rows = out.shape[:-1].numel()
    assert (name, size, M, N, K) == (tile, (grid, 1, 1), rows, hidden, 768)
    assert (BM, BN, BK) == getattr(script, tile)[:3] and made == (tma and tile == "LARGE")
    for matrix, shape in zip(matrices, ([M, K], [2 * N, K], [M, N])):
        base = matrix.base if made else matrix
        assert base.is_contiguous() and base.numel() == shape[0] * shape[1]
        assert not made or (matrix.shape, matrix.strides) == (shape, [shape[1], 1])


def test_from_mlp():
    mlp = MLP(16, 24)
    fused = script.FusedGeGLUMLP.from_mlp(mlp)
    assert fused.down_proj is mlp.down_proj and fused.gate_up.requires_grad
    eights = fused.gate_up.detach().view(3, 2, 8, 16)
    assert torch.equal(eights[:, 0].reshape(24, 16), mlp.gate_proj.weight)
    assert torch.equal(eights[:, 1].reshape(24, 16), mlp.up_proj.weight)
    assert not script.FusedGeGLUMLP.from_mlp(mlp.requires_grad_(False)).gate_up.requires_grad
    for name in ("gate_proj", "up_proj"):
        biased = MLP(16, 24)
        setattr(biased, name, nn.Linear(16, 24))
        with pytest.raises(ValueError, match="without bias"):
            script.FusedGeGLUMLP.from_mlp(biased)
    with pytest.raises(ValueError, match="multiples of 8"):
        script.FusedGeGLUMLP.from_mlp(MLP(16, 20))
    fused.half().requires_grad_(False)
    with pytest.raises(RuntimeError, match="not on cpu"):
        fused(torch.zeros(2, 16, dtype=torch.float16))


# ---- numbers on a GPU ----


@gpu
@settings(max_examples=80, deadline=None)
@given(st.lists(ints(0, 12), max_size=3), ints(1, 60), ints(1, 60), st.sampled_from(HALVES),
       st.sampled_from((1, 30)))
@example(lead=[8192], dim8=96, hidden8=384, dtype=torch.bfloat16, scale=1)
@example(lead=[3, 1001], dim8=97, hidden8=129, dtype=torch.float16, scale=1)
@example(lead=[700], dim8=50, hidden8=50, dtype=torch.bfloat16, scale=1e8)
@torch.no_grad()
def test_no_worse_than_eager(lead, dim8, hidden8, dtype, scale):
    torch.manual_seed(dim8)
    x, gate, up = case(lead, 8 * dim8, 8 * hidden8, dtype, "cuda", scale)
    y = script.fused_geglu(x, script.interleave(gate, up))
    assert y.shape == (*lead, 8 * hidden8) and y.dtype == dtype
    # Of a few numbers, eager may by luck round all well; one rounding is what fused may always do
    luck = torch.finfo(dtype).eps / 2 if y.numel() < 1000 else 0
    assert error(y, x, gate, up) <= max(error(eager(x, gate, up), x, gate, up), luck)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_small_where_gelu_is_small(dtype):
    """Gates of about -4, where gelu is the difference of two numbers near 1 if computed naively."""
    x, gate, up = case((500,), 256, 256, dtype, "cuda")
    x, gate = x.abs(), -gate.abs() / 2.5
    y = script.fused_geglu(x, script.interleave(gate, up))
    assert error(y, x, gate, up) <= error(eager(x, gate, up), x, gate, up)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_nan_and_inf_reach_the_output(dtype):
    x, gate, up = case((300,), 64, 200, dtype, "cuda")
    x[5, 7], x[140, 0], x[299, 63] = float("nan"), float("inf"), -float("inf")
    y, odd = script.fused_geglu(x, script.interleave(gate, up)), [5, 140, 299]
    torch.testing.assert_close(y[odd], eager(x, gate, up)[odd], equal_nan=True, rtol=0, atol=0)
    assert y.isfinite().all(1).sum() == 297


@gpu
@torch.no_grad()
def test_slices_and_offsets():
    x, gate, up = case((200,), 80, 64, torch.float16, "cuda")
    w = script.interleave(gate[:, :64].contiguous(), up[:, :64].contiguous())
    flat = x.flatten()[1:12801].view(200, 64)  # starts at 2 bytes
    for odd in (x[:, :64], x[:, 3:67], x[::2, 16:], flat, flat[:40], x[:, :64].expand(2, 200, 64)):
        plain = torch.empty(odd.shape, dtype=odd.dtype, device="cuda").copy_(odd)
        assert torch.equal(script.fused_geglu(odd, w), script.fused_geglu(plain, w))


@gpu
@torch.no_grad()
def test_new_sizes_compile_nothing():
    def entries():
        return sum(len(cache[0]) for cache in script.geglu_gemm.device_caches.values())

    for dtype in HALVES:
        for lead in ((64, 128), (1,), (16,), (2, 3), (0,), (7, 11, 13), (8191,), (8192,)):
            for dim, hidden in ((768, 3072), (8, 8), (24, 40)):
                x, gate, up = case(lead, dim, hidden, dtype, "cuda")
                script.fused_geglu(x, script.interleave(gate, up))
                if lead == (64, 128) and dim == 768:
                    first = entries()
        assert entries() == first >= 2


@gpu
def test_module_and_trace(tmp_path):
    mlp = MLP(768, 3072).to("cuda", torch.bfloat16)
    fused = script.FusedGeGLUMLP.from_mlp(mlp)
    x = torch.randn(4, 128, 768, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no backward"):
        fused(x)
    with torch.inference_mode():
        exact = copy.deepcopy(mlp).double()(x.double())
        assert (fused(x).double() - exact).norm() <= (mlp(x).double() - exact).norm()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, record_shapes=True) as prof:
            fused(x)
            torch.cuda.synchronize()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    row, = (e for e in events if e["name"] == "FusedGeGLU")
    assert row["cat"] == "cpu_op" and row["args"]["Input Dims"] == [[4, 128, 768], [6144, 768]]
    kernels = sorted((e["ts"], e["name"]) for e in events if e.get("cat") == "kernel")
    assert len(kernels) == 2 and kernels[0][1] == "geglu_gemm"
    ours, = (e for e in events if e.get("cat") == "kernel" and e["name"] == "geglu_gemm")
    assert ours["args"]["External id"] == row["args"]["External id"]


if __name__ == "__main__":
    check_in_interpreter()

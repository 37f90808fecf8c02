"""How fast traces/read.py is, run by hand: python tests/bench_read.py [--mb 100]

A trace of 100 MB, as a long recording writes it, must take at most twice the time of json.load on
the same file and 1.5 times its peak memory; a reference trace at most 0.3 s of wall time, the
interpreter's start included. Each run is a process of its own. Exit code 1 when one takes more.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
READ = ROOT / "traces" / "read.py"
JSON_LOAD = "import json, sys; json.load(open(sys.argv[1]))"


def step_events(step, start, python, name):
    """The events of a step that starts at `start` ns: 40 operators, each with a view, a launch and
    its kernel, and with `python` the stack frames that called it, in an annotation `name`."""
    def event(cat, name, at, length, tid=1, pid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start + at,
                "dur": length, "args": args}

    yield event("user_annotation", name, 0, 1_000_000, **{"External id": step})
    shapes = {"Input Dims": [[8192, 768], [768, 3072], []],
              "Input type": ["c10::BFloat16", "c10::BFloat16", ""],
              "Input Strides": [[768, 1], [1, 768], []], "Concrete Inputs": ["", "", ""]}
    for i in range(40):
        at, number = 20_000 * i + 1_000, 1_000_000 + step * 100 + 2 * i
        for depth in range(10 if python else 0):
            name = f"torch/nn/modules/module.py({1500 + depth}): _call_impl"
            yield event("python_function", name, at - 100 + depth, 19_000 - 2 * depth, **{
                "Python parent id": number + depth - 1, "Python id": number + depth})
        yield event("cpu_op", "aten::mm", at, 15_000, **{"External id": number}, **shapes)
        yield event("cpu_op", "aten::as_strided", at + 100, 1_000,
                    **{"External id": number + 1}, **shapes)
        yield event("cuda_runtime", "cudaLaunchKernel", at + 5_000, 4_000, correlation=number,
                    cbid=211, **{"External id": number})
        yield event("kernel", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", at + 12_000, 18_000,
                       7, 0, correlation=number, device=0, stream=7, grid=[132, 1, 1],
                       block=[384, 1, 1], queued=0, context=1, **{
                           "External id": number, "registers per thread": 168,
                           "shared memory": 213248, "blocks per SM": 1, "warps per SM": 12,
                           "est. achieved occupancy %": 19})
        for ph, tid, pid, ts in ("s", 1, 1, at + 5_000), ("f", 7, 0, at + 12_000):
            flow = {"ph": ph, "id": number, "pid": pid, "tid": tid, "ts": start + ts, "cat": "ac2g",
                    "name": "ac2g"}
            yield flow | {"bp": "e"} if ph == "f" else flow


def write_trace(path, size, python=False, steps=True):
    """Writes whole steps until the file has `size` bytes, times as µs with three decimals; without
    `steps` nothing marks them as such, so that read.py takes all for one."""
    with open(path, "w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],\n'
                   '"traceEvents": [\n')
        step, start = 0, 5_193_448_978_608_737
        while file.tell() < size:
            name = f"ProfilerStep#{step}" if steps else f"block {step}"
            for event in step_events(step, start, python, name):
                text = json.dumps(event)
                file.write(re.sub(r'"(ts|dur)": (\d+)(\d{3})\b', r'"\1": \2.\3', text) + ",\n")
            step, start = step + 1, start + 1_000_123
        file.write('{"ph": "M", "name": "end", "pid": 1, "tid": 0, "ts": 0, "args": {}}]}\n')


def run(*command):
    """(seconds of wall time, peak memory in MB) of a command that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {command}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def best(repeat, *command):
    """The least time and memory of several runs: what else the machine does only adds to them."""
    runs = [run(*command) for _ in range(repeat)]
    return min(seconds for seconds, _ in runs), min(memory for _, memory in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100, help="size of the large trace")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        for what, how in (("steps", {}), ("steps, python stacks", {"python": True}),
                          ("one step of everything", {"steps": False})):
            write_trace(path, args.mb * 1_000_000, **how)
            load, load_mb = best(args.repeat, "-c", JSON_LOAD, path)
            read, read_mb = best(args.repeat, READ, path)
            failed |= read > 2 * load or read_mb > 1.5 * load_mb
            print(f"{args.mb} MB, {what}: json.load {load:.2f} s, {load_mb:.0f} MB; read.py "
                  f"{read:.2f} s, {read_mb:.0f} MB, {read / load:.2f} times the time, "
                  f"{read_mb / load_mb:.2f} times the memory")
    path = max(ROOT.glob("traces/*/*/*.json"), key=lambda path: path.stat().st_size)
    seconds, _ = best(args.repeat, READ, path)
    print(f"{path.name}, {path.stat().st_size / 1e3:.0f} kB: {seconds:.3f} s")
    return int(failed or seconds > 0.3)


if __name__ == "__main__":
    sys.exit(main())

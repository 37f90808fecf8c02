"""Record the reference traces anew on the GPU at hand, or bring the documents up to date.

    python traces/record.py             record into traces/GPU/, GPU a short name of this one: h200
    python traces/record.py --docs      write the generated parts of both READMEs from those files

All runs go to a temporary folder first. Only when every one of them ended well do their traces,
tables and output take the place of the older ones.
"""
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = """
03_kernels_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072
03_simple_mlp.py --batch 64 --seq 128 --dim 768 --hidden 3072
02_linear.py --batch 1024 --in_dim 32 --out_dim 64
01_matmul_add.py --size 64
01_matmul_add.py --size 64 --compile
01_matmul_add.py --size 64 --warmup
01_matmul_add.py --size 512 --warmup --eager
01_matmul_add.py --size 4096 --warmup
01_matmul_add.py --size 8192 --warmup --eager
""".strip().splitlines()


def record(folder):
    """Run every command of RUNS in folder; what each prints is kept in SCRIPT/output.txt."""
    for command in RUNS:
        print(command, flush=True)
        script, *flags = command.split()
        done = subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, text=True,
                              capture_output=True)
        if done.returncode:
            sys.exit(f"record.py: {command} failed; nothing was replaced:\n{done.stderr}")
        with open(folder / "traces" / script[:-3] / "output.txt", "a", encoding="utf-8") as output:
            output.write(f"$ python {command}\n{done.stdout}\n")


def short_name(gpu):
    """NVIDIA H200 -> h200, NVIDIA A100-SXM4-80GB -> a100."""
    words = re.sub(r"NVIDIA|AMD|Instinct|GeForce|Tesla|RTX|Radeon", " ", gpu).split()
    return words[0].split("-")[0].lower()


def output():
    """What 03_kernels_mlp printed: the command, the first variant, and the table."""
    printed = (ROOT / "traces/h200/03_kernels_mlp/output.txt").read_text("utf-8").split("\n\n")
    return "```text\n" + "\n\n".join([*printed[:2], printed[-3]]) + "\n```"


DOCS = {"README.md": {"output": output}}


def docs(path):
    """The document at path, each part between <!-- NAME --> and <!-- end --> written anew."""
    text = (ROOT / path).read_text("utf-8")
    for name, part in DOCS[path].items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        head, rest = text.split(start)
        text = f"{head}{start}{part()}\n{end}{rest.split(end, 1)[1]}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--docs", action="store_true", help="only bring the READMEs up to date")
    if parser.parse_args().docs:
        for path in DOCS:
            (ROOT / path).write_text(docs(path), "utf-8")
        return
    import torch
    if not torch.cuda.is_available():
        sys.exit("record.py: PyTorch finds no GPU here, and a reference trace shows one.")
    gpu = short_name(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        target = ROOT / "traces" / gpu
        shutil.copytree(Path(folder, "traces"), target, dirs_exist_ok=True)
    print(f"recorded {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

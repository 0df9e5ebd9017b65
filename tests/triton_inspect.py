"""Compiles kernels for an H100 on any machine and reads the machine code: registers, spills, tensor core instructions.

    python tests/triton_inspect.py         a row of JSON for every kernel and tile in the tables of train_gpt.py

Needs Triton with its own ptxas, no GPU. It must not run where TRITON_INTERPRET is set: kernels are decorated when
train_gpt.py is imported, so that tests start it as a process of its own.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS, SHARED, THREADS = 65_536, 233_472, 2048     # of a multiprocessor; 1 KiB of shared memory a program is the system's


def output(tool, *words, error=False):
    done = subprocess.run([TOOLS / tool, *words], capture_output=True, text=True)
    return done.stderr if error else done.stdout


def inspect(kernel, types, constants, multiples=(), **options):
    """What ptxas made of a kernel for sm_90a: a dict. types: {argument: "*bf16", "i32", "tensordesc<bf16[64, 64]>", ...};
    constants: the constexpr arguments, those with a default may be left out; multiples: integers known to be multiples of 16;
    options: num_warps, num_stages."""
    names = [p.name for p in kernel.params]
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | constants
    source = ASTSource(
        fn=kernel, signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n not in constants and (types[n].startswith("*") or n in multiples)})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "k.cubin", Path(folder) / "k.ptx"
        cubin.write_bytes(built.asm["cubin"])
        ptx.write_text(built.asm["ptx"])
        usage = output("cuobjdump", "--dump-resource-usage", cubin)
        code = output("nvdisasm", "-c", cubin)
        said = output("ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", Path(folder) / "again.cubin", error=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    threads, shared = 32 * built.metadata.num_warps, built.metadata.shared
    return {"registers": registers, "stack": stack, "shared": shared,
            "programs": min(REGISTERS // (-(-registers // 8) * 8 * threads), SHARED // (shared + 1024), THREADS // threads),
            "serialised": re.findall(r"\((C75\d\d)\)", said), "wgmma": code.count("HGMMA") + code.count("QGMMA"),
            "in_flight": max(map(int, re.findall(r"pendings = (\d+)", built.asm["ttgir"])), default=0),   # past a wait
            "left_in_registers": len(re.findall(r"[HQ]GMMA\S* R\d+, R\d+, gdesc", code)),
            "mma": len(re.findall(r"\b[HIQ]MMA", code)), "instructions": code.count(" ;")}


HELD = {"_attention_kernel": ("q",), "_attention_dq_kernel": ("q", "dy"), "_attention_dkv_kernel": ("k", "v")}   # left
ROWS = {"q": "E", "k": "E", "v": "E_V", "y": "E_V", "dy": "E_V", "dq": "E", "dk": "E", "dv": "E_V"}   # widths of the operands


def attention(kernel, widths, tile, pairs, dtype="bf16", **more):
    """inspect for a kernel of section 4.1: one that has a tile (queries, keys, warps, stages) for these widths."""
    I, J, warps, stages = tile
    sizes, places = {"E": widths[0], "E_V": widths[1]}, 1 + pairs
    types = {"lse": f"tensordesc<fp32[{I}]>", "delta": f"tensordesc<fp32[{I}]>", "lse_ptr": "*fp32", "delta_ptr": "*fp32",
             "start_ptr": "*i32", "ends_ptr": "*i32"}
    pitches = [f"{name}_pitch" for name in (*HELD[kernel.__name__], "y")]
    types |= dict.fromkeys(("T", "window", "lse_pitch", *pitches), "i32")
    for name, width in ROWS.items():
        shape = [J if name[-1] in "kv" else I, sizes[width]]
        shape = [shape[0] // places, places, shape[1]] if pairs else shape
        types[name] = f"tensordesc<{dtype}[{', '.join(map(str, shape))}]>"
    if pairs:
        types |= dict.fromkeys(HELD[kernel.__name__], f"*{dtype}")
    if kernel.__name__ == "_attention_dq_kernel":
        types["y"] = f"*{dtype}"                # read once, into registers
    constants = {"PLACES": places, "I": I, "J": J, **sizes, **more}
    return inspect(kernel, types, constants, multiples=pitches, num_warps=warps, num_stages=stages)


def every_attention(tg):
    """(kernel, widths, tile, pairs) of all that the network uses, and in pairs the only widths that it pairs."""
    for kernel, table in ((tg._attention_kernel, tg.ATTN_FORWARD), (tg._attention_dq_kernel, tg.ATTN_DQ),
                          (tg._attention_dkv_kernel, tg.ATTN_DKV)):
        for widths, tile in table.items():
            for pairs in (False, True) if widths == (64, 128) else (False,):
                yield kernel, widths, tile, pairs


def main():
    import train_gpt as tg

    def row(job):
        kernel, widths, tile, pairs = job
        return {"kernel": kernel.__name__, "widths": widths, "tile": tile, "pairs": pairs, **attention(*job)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(row, every_attention(tg)):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""bf16 products on a host without bf16 instructions: converted, accumulated in fp32, rounded once."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In a process of its own: the operators are replaced for good.
PRODUCTS = """
import torch
from recipes.grpo_smollm2.cpu_bf16 import multiply_through_fp32

a, b, c = (torch.randn(3, 8, 8).bfloat16() for _ in range(3))
calls = {
    "mm": lambda *t: t[0][0] @ t[1][0],
    "bmm": lambda *t: torch.bmm(t[0], t[1]),
    "addmm": lambda *t: torch.addmm(t[2][0], t[0][0], t[1][0]),
    "baddbmm": lambda *t: torch.baddbmm(t[2], t[0], t[1], beta=0.0, alpha=0.3),
}
wide = {name: call(a.float(), b.float(), c.float()) for name, call in calls.items()}
multiply_through_fp32()
multiply_through_fp32()
for name, call in calls.items():
    assert torch.equal(call(a, b, c), wide[name].bfloat16()), name
    assert torch.equal(call(a.float(), b.float(), c.float()), wide[name]), name
x = torch.randn(4, 8).bfloat16().requires_grad_()
weight = torch.randn(6, 8).bfloat16()
gradient = torch.randn(4, 6).bfloat16()
torch.nn.functional.linear(x, weight).backward(gradient)
assert torch.equal(x.grad, (gradient.float() @ weight.float()).bfloat16())
"""


def test_each_product_is_that_of_fp32_rounded_once_and_fp32_keeps_its_bits() -> None:
    done = subprocess.run([sys.executable, "-c", PRODUCTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Section 3: number formats."""

import torch


def test_master_weight_round_trip_is_exact(tg):
    """Bit for bit, for 2^20 random bit patterns of finite numbers, subnormal ones too, and the edges of rounding."""
    bits = torch.randint(-2**31, 2**31 - 1, (2**20,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0, 0x8000, 0x7FFF, 0xFFFF, 0x18000, 0x3F808000, 0x7F7FFFFF, -0x80000000, -0x7FFF8000, -0x800001])
    x = torch.cat((bits, edges)).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    assert ((x != 0) & (x.abs() < 2.0**-126)).sum() > 1000 and (x < 0).float().mean() > 0.4
    hi, lo = tg.split_master(x)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(tg.join_master(hi, lo).view(torch.int32), x.view(torch.int32))
    ties = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(hi[~ties].view(torch.int16), x[~ties].to(torch.bfloat16).view(torch.int16)) and 5 < ties.sum() < 99


def test_the_weight_is_the_rounded_master(tg):
    """hi is the nearest bf16, not the truncated one: at most half a step of bf16 away."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    hi, _ = tg.split_master(x)
    ulp = 2.0 ** (torch.floor(torch.log2(x.abs())) - 7)
    assert ((hi.float() - x).abs() <= ulp / 2).all()
    ties = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(hi[~ties], x.to(torch.bfloat16)[~ties])


def test_small_steps_add_up_in_a_bf16_weight_with_its_low_bits(tg):
    hi, lo = tg.split_master(torch.ones(4))
    for _ in range(1000):
        hi, lo = tg.split_master(tg.join_master(hi, lo) + 1e-4)
    assert torch.allclose(tg.join_master(hi, lo), torch.full((4,), 1.1), atol=1e-3)
    assert torch.equal((torch.ones(4).bfloat16() + 1e-4), torch.ones(4).bfloat16())

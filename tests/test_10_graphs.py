"""Section 10: what happens before the clock leaves no trace."""

from dataclasses import replace

import torch


def test_warm_up_leaves_everything_bit_equal(tg, one_rank):
    """Weights, gradients, states, the count of Adam steps and the random number generator."""
    cfg = replace(tg.PRESETS["tiny"], d_model=24, d_head=4, d_mlp=40, val_seq=64)
    cfg = replace(cfg, stages=tuple(replace(stage, T=stage.T // 8) for stage in cfg.stages))
    model = tg.Model(cfg, torch.device("cpu"))
    opt = tg.Optimizer(tg.param_table(model, cfg), one_rank, n_micro=8, muon_lr=.02, muon_wd=1., adam_lr=.01,
                       adam_wd=.1, adam_eps=1e-10)
    for i, x in enumerate(opt.tensors()):            # states as in the middle of a run
        x.uniform_(generator=torch.Generator().manual_seed(i))
    before, rng, n_adam = [x.clone() for x in opt.tensors()], torch.get_rng_state(), opt.n_adam
    views = [tg.view_at(cfg, k, one_rank.device, stage.T) for k, stage in enumerate(cfg.stages)]
    touched = []
    real = opt.step
    opt.step = lambda *rest: (real(*rest), touched.append(not torch.equal(opt.tensors()[0], before[0])))
    tg.warm_up(cfg, model, opt, views, tg.view_at(cfg, 4, one_rank.device, 64, 160))
    assert touched == [True, True]
    assert all(torch.equal(x, y) for x, y in zip(opt.tensors(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng) and opt.n_adam == n_adam


def test_synthetic_tokens_are_legal_and_differ(tg):
    tokens, targets, doc_start = tg.synthetic(5000, torch.device("cpu"))
    assert tokens.max() < tg.VOCAB and len(set(tokens.tolist())) == 5000 and torch.equal(tokens[1:], targets[:-1])
    assert not doc_start.any()

"""Section 8: documents, packing, shards, validation streams, and the worker."""

import hashlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, docs, shard
from hypothesis import given, settings
from hypothesis import strategies as st


def test_packing_example(tg):
    """Documents at 0, 5, 12, 14, 30 of 40 tokens, T = 8, at most 6 tokens each: worked out by hand."""
    start, stop = np.array([0, 5, 12, 14, 30]), np.array([5, 12, 14, 30, 40])
    begins, lengths, after = tg.pack(start, stop, 0, 8, 6)
    assert (begins.tolist(), lengths.tolist(), after) == ([0, 5], [5, 4], 2)
    begins, lengths, after = tg.pack(start, stop, 2, 8, 6)
    assert (begins.tolist(), lengths.tolist(), after) == ([12, 14, 30], [2, 6, 1], 5)
    assert tg.pack(start, stop, 5, 8, 6) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 100), st.integers(1, 20),
       st.integers(0, 5))
def test_packing_properties(sizes, n_tokens, max_doc, first):
    """Spans hold exactly n_tokens + 1 tokens, each begins where a document does and stays inside max_doc."""
    import train_gpt as tg
    stop = np.cumsum(sizes)
    start = stop - sizes
    spans = tg.pack(start, stop, first, n_tokens, max_doc)
    room = sum(min(n, max_doc) for n in sizes[first:])
    if room < n_tokens + 1:
        assert spans is None
        return
    begins, lengths, after = spans
    assert lengths.sum() == n_tokens + 1 and lengths.min() >= 1
    assert begins.tolist() == start[first:after].tolist()
    assert lengths[:-1].tolist() == [min(n, max_doc) for n in sizes[first:after - 1]]
    assert lengths[-1] <= min(sizes[after - 1], max_doc)


def corpus_of(tg, tmp_path, pieces, repeat=False):
    paths = [str(shard(tmp_path / f"train_{i:06d}.bin", np.array(p, np.uint16))) for i, p in enumerate(pieces)]
    return tg.Corpus(paths, repeat)


def all_documents(corpus):
    while corpus.find_more():
        pass
    return [corpus.read(np.array([a]), np.array([b - a])).tolist() for a, b in zip(corpus.start, corpus.stop)]


B = 50256


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_files_are_one_list_of_documents(tg, tmp_path, monkeypatch, piece):
    """Headless pieces are skipped, a document ends with its file, empty files are nothing; however it is searched."""
    monkeypatch.setattr(tg, "INDEX_TOKENS", piece)
    corpus = corpus_of(tg, tmp_path, [[B, 1, 2, B, 3], [], [7, 7, B, 4, 5, B], [9], [B, 6]])
    assert all_documents(corpus) == [[B, 1, 2], [B, 3], [B, 4, 5], [B], [B, 6]]


def test_a_micro_batch_may_span_two_files(tg, tmp_path):
    corpus = corpus_of(tg, tmp_path, [[B, 1, 2, 3], [8, B, 4, 5, 6, B, 7]])
    assert corpus.read(*corpus.take(6, 100)).tolist() == [B, 1, 2, 3, B, 4, 5]
    with pytest.raises(tg.RunFailed, match="at an end"):
        corpus.take(6, 100)


def test_repeat_starts_over_and_counts_epochs(tg, tmp_path):
    corpus = corpus_of(tg, tmp_path, [[B, 1, B, 2, 3]], repeat=True)
    seen, epochs = [], []
    for _ in range(4):
        seen += corpus.read(*corpus.take(2, 100)).tolist()
        epochs.append(corpus.epoch)
    assert seen == [B, 1, B] + [B, 1, B] * 3 and epochs == [1, 2, 3, 4]


def test_an_id_outside_the_vocabulary_is_named_when_its_batch_is_read(tg, tmp_path):
    corpus = corpus_of(tg, tmp_path, [[B, 1, 50257, 3]])
    with pytest.raises(tg.Refusal, match="train_000000.bin: id 50257 at token 2"):
        corpus.read(*corpus.take(3, 10))


def test_a_shard_of_more_than_2_gib_is_read_to_its_end(tg, tmp_path):
    """1.2 billion tokens, nearly all of them a hole in the file; the last document lies beyond 2 GiB."""
    path, n = tmp_path / "train_000001.bin", 1_200_000_000
    shard(path, np.array([B, 1, 2], np.uint16), claim=n)
    with open(path, "r+b") as f:
        f.truncate(1024 + 2 * n)
        f.seek(1024 + 2 * (n - 4))
        f.write(np.array([B, 11, 12, 13], "<u2").tobytes())
    corpus = tg.Corpus([str(path)], False)
    corpus.looked = n - 1000                     # the search itself is the same everywhere
    assert all_documents(corpus) == [[B, 11, 12, 13]]
    assert corpus.start[0] == n - 4


def test_doc_starts(tg):
    tokens = np.array([5, 6, B, 7, B, B, 8])
    assert tg.doc_starts(tokens).tolist() == [0, 0, 2, 2, 4, 5, 5] and tg.doc_starts(tokens).dtype == np.int32


def config(tg, tmp_path, **changes):
    return replace(tg.PRESETS["tiny"], train_files=str(tmp_path / "train_*.bin"),
                   val_files=str(tmp_path / "val_*.bin"), **changes)


class Rank:
    """Stands for Comm where no collective is needed."""
    device = torch.device("cpu")

    def __init__(self, rank, world):
        self.rank, self.world = rank, world


@pytest.mark.parametrize("world", [1, 2, 8])
def test_validation_streams_cover_the_tokens_once(tg, tmp_path, world):
    """Over two files, whose border lies inside a stream; targets are the next tokens."""
    tokens = docs(900, 70, 0)
    shard(tmp_path / "val_000000.bin", tokens[:333]), shard(tmp_path / "val_000001.bin", tokens[333:])
    cfg = config(tg, tmp_path, val_tokens=800, val_seq=100)
    found = {}
    for rank in range(world):
        for i, stream in zip(range(rank, 8, world), tg.read_validation(cfg, Rank(rank, world), tg.Vocabulary(cfg.vocab_file, True))):
            found[i] = stream
    assert sorted(found) == list(range(8))
    table = tg.Vocabulary(ROOT / "data/gpt2_vocab.bin", True).folded
    for i, (inputs, doc_start, folded, targets, weights, classes) in found.items():
        want = tokens[100 * i:100 * i + 101].astype(int)
        assert folded.tolist() == table[want[:-1]].tolist()
        assert inputs.tolist() == want[:-1].tolist() and targets[:, 0].tolist() == want[1:].tolist()
        assert (weights == 1).all() and classes is None and targets.shape == weights.shape == (100, 1)
        assert doc_start.tolist() == tg.doc_starts(want[:-1]).tolist()
    assert (inputs.dtype, targets.dtype, doc_start.dtype) == (torch.int32, torch.int64, torch.int32)


PLAN = [(96, 60, 300, (1.0, 0.5, 0.25), (0.25,)), (96, 60, 400, (1.0, 0.5), (0.1,)), (128, 200, 50_304, (1.0,), ()),
        (64, 30, 300, (1.0,), ())] * 3


def plans(tg):
    return [tg.StepPlan(*row) for row in PLAN]


def batches(tg, cfg, rank, world, between=lambda loader: None):
    """{(step, m): what Model.forward takes} of one rank, and the loader."""
    loader = tg.Loader(cfg, Rank(rank, world), plans(tg))
    loader.resume()
    seen = {}
    for step in range(len(PLAN)):
        for m, micro in zip(loader.mine, loader.next()):
            seen[step, m] = tuple(x if x is None else x.tolist() for x in micro)
        between(loader)
    return seen, loader


def test_micro_batches_do_not_depend_on_the_world_size(tg, tmp_path):
    shard(tmp_path / "train_000001.bin", docs(6000, 45, 1)), shard(tmp_path / "train_000002.bin", docs(30_000, 77, 2))
    cfg = config(tg, tmp_path)
    alone, loader = batches(tg, cfg, 0, 1)
    crcs = [crc for by_step in loader.crcs for crc in by_step]
    assert len(alone) == 8 * len(PLAN) and len(set(crcs)) == len(crcs)
    for world in (2, 4, 8):
        spread = {}
        for rank in range(world):
            spread |= batches(tg, cfg, rank, world)[0]
        assert spread == alone
    for (step, _), (tokens, doc_start, folded, targets, weights, classes) in alone.items():
        T, cap, P, future, prefix = PLAN[step]
        assert len(tokens) == T and tokens[0] == B
        assert folded == loader.vocabulary.folded[tokens].tolist()
        assert all(tokens[s] == B for s in doc_start) and max(t - s for t, s in enumerate(doc_start)) < cap
        classes = list(range(50_304)) if classes is None else classes
        assert len(classes) == P and classes == sorted(set(classes)) and 50_257 in classes
        for k, weight in enumerate(future):          # the k-th target is the token k + 1 further on
            named = [classes[row[k]] for row in targets[:T - 1 - k]]
            assert named == tokens[1 + k:] and [row[k] for row in weights] == [weight] * (T - k) + [0] * k
        assert all(len(row) == len(future) + len(prefix) for row in targets + weights)


def test_slow_consumers_and_pauses_change_nothing(tg, tmp_path):
    """Neither a late consumer nor a pause after every step changes a batch; a pause stops the preparing."""
    shard(tmp_path / "train_000001.bin", docs(20_000, 45, 1))
    cfg = config(tg, tmp_path)
    alone, _ = batches(tg, cfg, 0, 1)

    def pause(loader):
        loader.pause()
        ready = loader.ready.qsize()
        time.sleep(0.05)
        assert loader.ready.qsize() == ready
        loader.resume()
    assert batches(tg, cfg, 0, 1, pause)[0] == alone


def test_nothing_is_prepared_before_the_clock_runs(tg, tmp_path):
    shard(tmp_path / "train_000001.bin", docs(20_000, 45, 1))
    loader = tg.Loader(config(tg, tmp_path), Rank(0, 1), plans(tg))
    time.sleep(0.2)
    assert loader.ready.qsize() == 0 and loader.corpus.looked == 0
    loader.resume()
    loader.next()


def test_an_error_of_the_worker_is_raised_by_its_consumer(tg, tmp_path):
    shard(tmp_path / "train_000001.bin", docs(1000, 45, 1))
    loader = tg.Loader(config(tg, tmp_path), Rank(0, 1), plans(tg))
    loader.resume()
    with pytest.raises(tg.RunFailed, match="at an end"):
        for _ in PLAN:
            loader.next()


def test_a_host_slot_is_not_filled_again_before_its_copy_has_run(tg, tmp_path, monkeypatch):
    """With copies that the test finishes by hand, the worker stops after filling every slot once."""
    shard(tmp_path / "train_000001.bin", docs(20_000, 45, 1))
    work = tg.Loader._work
    monkeypatch.setattr(tg.Loader, "_work", lambda self: None)
    loader = tg.Loader(config(tg, tmp_path), Rank(0, 1), plans(tg))

    class Copy:
        done, recorded = threading.Event(), False

        def record(self):
            self.recorded = True

        def synchronize(self):
            assert not self.recorded or self.done.wait(10)
    loader.free.queue.clear()
    for i in range(tg.N_SLOTS):
        loader.free.put((i, Copy()))
    threading.Thread(target=work, args=(loader,), daemon=True).start()
    loader.resume()
    loader.next()
    for _ in range(500):
        if loader.ready.qsize() == tg.N_SLOTS - 1:
            break
        time.sleep(0.01)
    first = [x.clone() for x in loader.slots[0]]
    time.sleep(0.2)
    assert loader.ready.qsize() == tg.N_SLOTS - 1
    assert all(torch.equal(a, b) for a, b in zip(first, loader.slots[0]))
    Copy.done.set()
    loader.next(), loader.next(), loader.next()
    assert not all(torch.equal(a, b) for a, b in zip(first, loader.slots[0]))


def test_vocabulary_encodes_as_the_shipped_shards_do(tg):
    """Documents of the sample, decoded and encoded again, are their own tokens; and texts of many scripts survive."""
    vocabulary = tg.Vocabulary(ROOT / "data/gpt2_vocab.bin", True)
    assert len(vocabulary.bytes) == tg.VOCAB and vocabulary.bytes[262] == b" the"
    tokens = tg.open_shard(str(ROOT / "data/sample/sample_val_000000.bin"))[:6000]
    starts = np.flatnonzero(tokens == B)
    for a, b in zip(starts[:6], starts[1:7]):
        ids = tokens[a + 1:b].tolist()
        assert vocabulary.encode(vocabulary.decode(ids)) == ids
    assert vocabulary.encode("hello world") == [31373, 995]
    for text in ("I've 3 cats,\n\n  and 10² dogs…", "Übergröße 漢字 🙂 \u0430\u0431\u0432", "<|endoftext|>"):
        ids = vocabulary.encode(text)
        assert vocabulary.decode(ids) == text and B not in ids


def test_a_changed_vocabulary_file_is_refused(tg, tmp_path):
    (tmp_path / "vocab.bin").write_bytes(b"\x01a")
    with pytest.raises(tg.Refusal, match="SHA-256"):
        tg.Vocabulary(tmp_path / "vocab.bin", True)


# ---- targets and classes -----------------------------------------------------------------------------------

def test_prefix_table_is_the_published_one(tg):
    """Against the hash in the public notes, samples by hand, and every entry against its bytes."""
    vocabulary = tg.Vocabulary(ROOT / "data/gpt2_vocab.bin", True)
    table = vocabulary.prefixes
    sha = hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()
    assert sha == "36281293860d09f2307c3d2cd503f2e595e24c165fbd49b11f89cfaed71b617c"
    assert table.shape == (50_304,) and (table >= 0).sum() == 50_000 and table[50_256:].max() == -1
    known = {262: 294, 290: 281, 383: 536, 464: 817, 1169: 400, 50255: 17841, 5000: 2104, 20000: 7653, 257: 220}
    assert {i: int(table[i]) for i in known} == known
    for i in range(0, 50_256, 97):
        token, prefixes = vocabulary.bytes[i], [vocabulary.bytes[i][:n] for n in range(1, len(vocabulary.bytes[i]))]
        longest = max((p for p in prefixes if p in vocabulary.ids), key=len, default=None)
        assert (table[i] == -1 and longest is None) or vocabulary.bytes[table[i]] == longest, token


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_candidates(data):
    """Sorted, unique, P of them, with all targets and COPY; deterministic; the sweep stops behind the last taken."""
    import train_gpt as tg
    targets = np.array(data.draw(st.lists(st.integers(0, 50_256), min_size=1, max_size=300)))
    n = data.draw(st.integers(len(set(targets.tolist())) + 1, 700) | st.just(50_303))
    start = data.draw(st.integers(0, 50_303))
    classes, after = tg.candidates(targets, n, start)
    again, _ = tg.candidates(targets[::-1], n, start)
    assert classes.dtype == np.int64 and len(classes) == n and (np.diff(classes) > 0).all()
    assert set(targets.tolist()) | {50_257} <= set(classes.tolist()) and (classes == again).all()
    wanted, k, missing = set(targets.tolist()) | {50_257}, start, n - len(set(targets.tolist()) | {50_257})
    while missing:                                    # the definition, class by class
        c = k * 20_011 % 50_304
        missing -= c not in wanted
        wanted.add(c)
        k = (k + 1) % 50_304
    assert wanted == set(classes.tolist()) and after == k


def test_the_sweep_meets_every_class_before_it_begins_again(tg):
    """Without targets to skip, ceil(V / window) steps see them all."""
    seen, start, window = set(), 0, 1000
    for _ in range(-(-50_304 // (window - 2))):       # COPY and one target take two places
        classes, start = tg.candidates(np.array([0]), window, start)
        seen |= set(classes.tolist())
    assert seen == set(range(50_304))


def test_more_targets_than_classes_are_named(tg):
    with pytest.raises(tg.RunFailed, match="has 301 different targets, more than the 300 classes.*p_early"):
        tg.candidates(np.arange(300), 300, 0)


def test_weighted_targets_at_the_end_and_with_prefixes(tg):
    prefix_of = np.full(50_304, -1)
    prefix_of[7] = 3
    targets, weights = tg.weighted_targets(np.array([5, 7, 9], np.uint16), tg.StepPlan(3, 9, 9, (1.0, 0.5), (0.25,)),
                                           prefix_of)
    assert targets.tolist() == [[5, 7, -1], [7, 9, 3], [9, -1, -1]]
    assert weights.tolist() == [[1, 0.5, 0.25], [1, 0.5, 0.25], [1, 0, 0.25]]


def test_a_prefix_that_is_no_candidate_is_dropped(tg, tmp_path):
    """Weight 0 where there is no prefix, or it is not among the classes; never a position outside."""
    shard(tmp_path / "train_000001.bin", docs(6000, 45, 1))
    loader = tg.Loader(config(tg, tmp_path), Rank(0, 1), plans(tg))
    following = docs(97, 45, 3)[1:]
    targets, weights, classes = loader._targets(following, plans(tg)[0], 0)
    prefix = loader.vocabulary.prefixes[following]
    inside = np.isin(prefix, classes) & (prefix >= 0)
    assert 0 < inside.sum() < len(inside)
    assert ((weights[:, -1] == 0.25) == inside).all() and (weights[~inside, -1] == 0).all()
    assert (classes[targets[inside, -1]] == prefix[inside]).all() and 0 <= targets.min() and targets.max() < 300


def test_sweeps_begin_apart_and_belong_to_their_micro_batch(tg, tmp_path):
    shard(tmp_path / "train_000001.bin", docs(6000, 45, 1))
    loader = tg.Loader(config(tg, tmp_path), Rank(1, 4), plans(tg))
    assert loader.sweeps == [50_304 * m // 8 for m in range(8)]


# ---- n-grams -----------------------------------------------------------------------------------------------

LINE = np.array([50256, 464, 3797, 3332, 319, 262, 2603, 13], np.uint16)        # "The cat sat on the mat."


@pytest.fixture(scope="module")
def vocabulary():
    import train_gpt as tg
    return tg.Vocabulary(ROOT / "data/gpt2_vocab.bin", True)


def test_folded_ids_are_the_published_ones(tg, vocabulary):
    """32,980 classes, 17,277 changed ids, the hash of the notes; and the rule itself for samples of all scripts."""
    table = vocabulary.folded
    sha = hashlib.sha256(table[:50257].astype("<i4").tobytes()).hexdigest()
    assert sha == "79fb57ac259495ba36f1afb9b0d5da35f3048b5067fa59c101d5a3c1ed15c2a2"
    assert len(set(table[:50257].tolist())) == 32_980 and (table != np.arange(50_304)).sum() == 17_277
    assert table.shape == (50_304,) and (table[50_256:] == np.arange(50_256, 50_304)).all() and (table <= np.arange(50_304)).all()
    assert table[LINE].tolist() == [50256, 262, 3797, 3332, 261, 262, 2603, 13]
    assert (table[table] == table).all()
    for a, b in ((" The", "the"), ("\n\n", " "), ("\t", " "), ("É".lower(), "e")):
        assert vocabulary.folded[vocabulary.ids[a.encode()]] == vocabulary.folded[vocabulary.ids[b.encode()]]
    for alone in (b"\x0b", b"\x0c", b"\xff", b"\xef\xb8\x8f"):
        assert table[vocabulary.ids[alone]] == vocabulary.ids[alone]


def test_without_folding_every_token_is_itself(tg):
    assert (tg.Vocabulary(ROOT / "data/gpt2_vocab.bin", False).folded == np.arange(50_304)).all()


def test_ranks_without_a_validation_stream_get_an_empty_one(tg, tmp_path):
    """Three streams on two ranks: each takes part in two exchanges of rows."""
    shard(tmp_path / "val_000000.bin", docs(301, 70, 0))
    cfg = config(tg, tmp_path, val_tokens=300, val_seq=100)
    vocabulary = tg.Vocabulary(cfg.vocab_file, True)
    streams = [tg.read_validation(cfg, Rank(rank, 2), vocabulary) for rank in range(2)]
    assert [[len(tokens) for tokens, *_ in mine] for mine in streams] == [[100, 100], [100, 0]]

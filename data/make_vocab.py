"""Writes gpt2_vocab.bin, the bytes of each of GPT-2's 50,257 tokens, from GPT-2's published encoder.json.

    python data/make_vocab.py path/to/encoder.json

For each id 0..50256: one length byte, then the bytes of the token. A token's merge rank is its id, so this
one file is enough to encode, to decode and to build the trainer's prefix and case-fold tables.
"""

import hashlib
import json
import sys
from pathlib import Path

from check_shards import VOCAB, VOCAB_FILE, VOCAB_SHA256, atomic_write


def byte_of_char():
    """encoder.json spells a byte as one printable character: itself where it is one, else U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def main(argv):
    if len(argv) != 1:
        print(f"Found {len(argv)} arguments, want 1: the path of encoder.json.", file=sys.stderr)
        return 2
    id_of_token = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    byte_of = byte_of_char()
    tokens = [bytes(byte_of[char] for char in token) for token in sorted(id_of_token, key=id_of_token.get)]
    blob = b"".join(bytes([len(token)]) + token for token in tokens)
    digest = hashlib.sha256(blob).hexdigest()
    if len(tokens) != VOCAB or digest != VOCAB_SHA256:
        print(f"{argv[0]} is not GPT-2's encoder.json: {len(tokens):,} tokens with hash {digest[:12]}, "
              f"want {VOCAB:,} with {VOCAB_SHA256[:12]}.\n"
              "  Fix: give the encoder.json of OpenAI's gpt-2 release (1,042,301 bytes)", file=sys.stderr)
        return 1
    with atomic_write(VOCAB_FILE) as f:
        f.write(blob)
    print(f"{VOCAB_FILE}: {len(tokens):,} tokens, {len(blob):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

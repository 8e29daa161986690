"""Small datasets and tokenizers on disk, of this repository's own pages."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 320


def documents() -> list[str]:
    """Paragraphs of the pages."""
    pages = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "maxtext/README.md"))
    return [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if len(part) > 40]


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that has a length."""
    size, length = len(content), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def example(text: str) -> bytes:
    """TensorFlow's ``Example`` with one feature, ``text``."""
    feature = _field(1, _field(1, text.encode()))
    return _field(1, _field(1, _field(1, b"text") + _field(2, feature)))


def array_records(folder: Path, texts: Sequence[str], files: int = 2) -> str:
    """Write ArrayRecord files of TensorFlow's examples; return their pattern."""
    from array_record.python.array_record_module import ArrayRecordWriter

    for number in range(files):
        writer = ArrayRecordWriter(str(folder / f"part-{number}.arrayrecord"), "group_size:1")
        for text in texts[number::files]:
            writer.write(example(text))
        writer.close()
    return str(folder / "*.arrayrecord")


def parquet(folder: Path, texts: Sequence[str], files: int = 2) -> str:
    """Write Parquet files; return their pattern."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(files):
        pq.write_table(pa.table({"text": list(texts[number::files])}), folder / f"part-{number}.parquet")
    return str(folder / "*.parquet")


def json_lines(folder: Path, texts: Sequence[str], files: int = 2) -> str:
    """Write files of a JSON object a line; return their pattern."""
    for number in range(files):
        lines = [json.dumps({"text": text}) for text in texts[number::files]]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "*.jsonl")


def mixture(folder: Path, texts: Sequence[str]) -> Path:
    """Write two sets of ArrayRecord files, and a file that says in which shares they are mixed; return that."""
    parts = {}
    for name, weight, part in (("often", 3, texts[::2]), ("seldom", 1, texts[1::2])):
        (folder / name).mkdir()
        parts[name] = {"path": array_records(folder / name, part), "weight": weight}
    (config := folder / "mixture.json").write_text(json.dumps(parts), encoding="utf-8")
    return config


def tensorflow_dataset(folder: Path, texts: Sequence[str]) -> str:
    """Write a dataset of TensorFlow Datasets with its own writer; return its name."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tfds.dataset_builders.store_as_tfds_dataset(
        name="pages",
        version="1.0.0",
        data_dir=folder,
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        split_datasets={"train": tf.data.Dataset.from_tensor_slices({"text": list(texts)})},
    )
    return "pages"


def sentencepiece(folder: Path, texts: Sequence[str]) -> Path:
    """Train a tokenizer of SentencePiece."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "pieces"),
        vocab_size=TOKENS,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "pieces.model"


def huggingface(folder: Path, texts: Sequence[str]) -> Path:
    """Train a tokenizer, and write it as Hugging Face's libraries read it."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=list(names.values()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf/tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "hf"


def tiktoken(folder: Path, pairs: int = 32) -> Path:
    """Write a table of tiktoken: every byte, and some pairs of letters."""
    frequent = [a + b for a in (b" ", b"e", b"t", b"a") for b in (b"t", b"a", b"s", b"e", b"r", b"n", b"o", b"i")][
        :pairs
    ]
    ranks = [*(bytes([n]) for n in range(256)), *frequent]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "tokenizer.tiktoken").write_text("\n".join(lines), encoding="utf-8")
    return folder / "tokenizer.tiktoken"

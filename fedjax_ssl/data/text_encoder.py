"""Features of texts by an encoder, such as BERT: what `launch.text_features` computes for `data.name=text_features`."""

import collections
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl import csv_files
from fedjax_ssl.data.sources import from_features
from fedjax_ssl.data.sources.text import STRONG
from fedjax_ssl.data.sources.values import MISSING, UNLABELED, from_text, is_integer
from fedjax_ssl.files import check_below

Encoder = Callable[[Sequence[str]], np.ndarray]
"""Texts [B] -> features float32 [B, D]."""
POOLING = ("cls", "mean")
HEADERS = ("label", "labels", "class", "category", "target")
"""What headers call the column of labels: a first label that is one of these, and that no other row has, is a header."""
CHANGED = 0.1  # as in EDA, Wei and Zou (2019), Section 2


class Texts(NamedTuple):
    """The labels of a file's rows, as they are written, and the texts of these rows."""

    labels: list[str]
    texts: list[str]


def read_csv(path: str) -> Texts:
    """The rows of a CSV file: label, text, more text. A backslash, which is a line break in AG News, becomes a space."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file: give a CSV file of label, text, ..., such as AG News' train.csv")
    labels, texts = list[str](), list[str]()
    for number, (_, (label, *columns)) in enumerate(csv_files.lines(path), start=1):
        text = " ".join(" ".join(columns).replace("\\", " ").split())
        for what, has in (("label", label), ("text", text)):
            if not has:
                got = f"row {number} has no {what}"
                raise ValueError(f"{path}: {got}: give a label, or -1, and at least one column of text in every row")
        labels.append(label)
        texts.append(text)
    if not texts:
        raise ValueError(f"{path}: no rows: give a CSV file of label, text, ...")
    are_numbers = all(is_integer(label) or label in MISSING for label in labels[1:])
    is_word = labels[0].lower() in HEADERS and labels.count(labels[0]) == 1
    if is_word or (not is_integer(labels[0]) and labels[0] not in MISSING and are_numbers):
        raise ValueError(f"{path}: row 1 has label {labels[0]!r}, which is a header: remove it")
    return Texts([str(label) for label in from_text(f"{path}: labels", labels)], texts)


def first_of_each_class(rows: Texts, per_class: int) -> tuple[Texts, Texts]:
    """Two parts of the rows, both in the file's order.

    The first one has the first `per_class` rows of each class (0: all) and all rows without a class, the second one the other
    rows.
    """
    first, others, seen = Texts([], []), Texts([], []), collections.Counter[str]()
    for label, text in zip(*rows, strict=True):
        seen[label] += 1
        part = others if per_class and seen[label] > per_class and label != str(UNLABELED) else first
        part.labels.append(label)
        part.texts.append(text)
    return first, others


def in_other_words(rows: Texts, seed: int = 0) -> Texts:
    """The rows with words left out and moved: a strong view without a translator. Ours, not a paper's.

    Each word of a text is left out with probability `CHANGED`, but at least one word stays. Each word that stays changes places
    with the next one with the same probability.
    """
    rng, texts = np.random.default_rng(seed), []
    for words in map(str.split, rows.texts):
        stays = rng.random(len(words)) >= CHANGED
        left = [word for word, stay in zip(words, stays, strict=True) if stay] or words[:1]
        for i in np.flatnonzero(rng.random(len(left) - 1) < CHANGED).tolist():
            left[i], left[i + 1] = left[i + 1], left[i]
        texts.append(" ".join(left))
    return Texts(rows.labels, texts)


def compute(
    train: Texts, test: Texts, strong: Texts | None, encoder: Encoder, batch_size: int = 64, progress: Callable = iter
) -> dict[str, Any]:
    """The arrays of the `.npz` file, checked, and the names of classes; `strong` has the rows of `train` with other texts."""
    if strong is not None and strong.labels != train.labels:
        differing = [i for i, pair in enumerate(zip(strong.labels, train.labels, strict=False), start=1) if pair[0] != pair[1]]
        where = f"row {differing[0]} has another label" if differing else f"{len(strong.labels)} rows"
        raise ValueError(f"the strong view: {where}: give the {len(train.labels)} training rows in their order, texts apart")
    unlabeled = str(UNLABELED)
    classes = sorted({*train.labels} - {unlabeled}, key=lambda label: (int(label) if is_integer(label) else math.inf, label))
    if unknown := sorted(set(test.labels) - set(classes)):
        accepted = ", ".join(classes)
        raise ValueError(f"the test file has label {unknown[0]!r}, which no training row has: accepted are {accepted}")
    kind = np.uint8 if len(classes) < 256 and unlabeled not in train.labels else np.int32
    number = {label: kind(i) for i, label in enumerate(classes)} | {unlabeled: np.int32(UNLABELED)}

    def features(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # a batch is padded to its longest text
        starts = progress(range(0, len(texts), batch_size))
        batches = [encoder([texts[i] for i in order[start : start + batch_size]]) for start in starts]
        return np.concatenate(batches).astype(np.float32)[np.argsort(order)]

    arrays: dict[str, Any] = {
        "train_features": features(train.texts),
        "train_labels": np.array([number[label] for label in train.labels]),
        "test_features": features(test.texts),
        "test_labels": np.array([number[label] for label in test.labels]),
    }
    if strong is not None:
        arrays[STRONG] = features(strong.texts)
    from_features(**arrays)
    return arrays | {"classes": np.array(classes)}


def hugging_face_encoder(name: str, pooling: str, max_length: int) -> Encoder:
    """A frozen float32 encoder, of the Hugging Face hub or a folder, that reads `max_length` tokens, special ones included."""
    check_below(name)
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{error.name} is not installed: python -m pip install -e ".[text]"') from error
    transformers.logging.set_verbosity_error()  # its report of a checkpoint's unused heads reads like an error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:  # missing files are refused, for which transformers makes up an empty tokenizer or random weights
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="right")  # `pool` reads the first token
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("the files of its tokenizer are missing")
        model, report = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
        if missing := sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")):  # it is not used
            raise ValueError(f"{len(missing)} of its weights are missing, {missing[0]} among them")
    except Exception as error:  # what is wrong surfaces as any exception of transformers, safetensors, torch or the system
        accepted = "a model of the Hugging Face hub, or a folder that holds one and its tokenizer"
        raise ValueError(f"--encoder: got {name}, accepted: {accepted} ({' '.join(str(error).split())})") from error
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or 0)
    shortest, longest = tokenizer.num_special_tokens_to_add() + 1, min(limit for limit in limits if limit > 0)
    if not shortest <= max_length <= longest:
        raise ValueError(f"--max_length: got {max_length}, accepted: {shortest} to {longest} tokens for {name}")
    model = model.to(device, torch.float32).eval()  # some checkpoints are stored, and then loaded, in half precision

    def encode(texts: Sequence[str]) -> np.ndarray:
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt").to(device)
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state
        return pool(hidden.cpu().numpy(), tokens["attention_mask"].cpu().numpy(), pooling)

    return encode


def pool(hidden: np.ndarray, mask: np.ndarray, pooling: str) -> np.ndarray:
    """Features [B, D] from the last layer's output [B, T, D]: of the first token (`cls`), or the `mean` where `mask` is 1."""
    if pooling == "cls":
        return hidden[:, 0]
    weight = mask[..., None].astype(np.float32)
    return (hidden * weight).sum(1) / weight.sum(1)

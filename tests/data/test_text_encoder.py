"""The real encoder of `launch.text_features`, on a tiny BERT with random weights that is made here: nothing is downloaded."""

import json
import logging

import numpy as np
import pytest

from fedjax_ssl.data import text_encoder
from launch import text_features
from tests.data.common import message_of

REASON = 'needs the optional dependencies: python -m pip install -e ".[text]"'
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "team", "won", "play", "##ing", "bank", "shares", "fell"]
TEXTS = ["Bank shares fell", "the team", "the TEAM playing the bank won the shares", "the zebra won"]
PIECES = ["bank shares fell", "the team", "the team play ##ing the bank won the shares", "the [UNK] won"]
LENGTH = 16  # of the model's longest text, in tokens
SIZE = 16


def tiny_bert():
    """A BERT of two layers; its weights are larger than BERT's at the start, so that its tokens differ."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def save(model, folder, **tokenizer):
    """Writes the model and its tokenizer in the files of bert-base-uncased."""
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **tokenizer}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


@torch.no_grad()
def expected(model, pooling):
    """Pooled from the last layer's output for each text alone, given as its pieces: with no tokenizer and no padding."""
    tokens = [[VOCABULARY.index(piece) for piece in f"[CLS] {pieces} [SEP]".split()] for pieces in PIECES]
    hidden = [model(input_ids=torch.tensor([one])).last_hidden_state[0].numpy() for one in tokens]
    return np.stack([of_text[0] if pooling == "cls" else of_text.sum(0) / len(of_text) for of_text in hidden])


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("pooling", text_encoder.POOLING)
def test_features_are_pooled_from_the_last_layer_without_padding(tmp_path, pooling, padding_side):
    model = tiny_bert()
    encode = text_encoder.hugging_face_encoder(save(model, tmp_path, padding_side=padding_side), pooling, LENGTH)
    features = encode(TEXTS)
    assert (features.dtype, features.shape) == (np.float32, (len(TEXTS), SIZE))
    np.testing.assert_allclose(features, expected(model, pooling), atol=1e-5)
    np.testing.assert_allclose(features, np.concatenate([encode([text]) for text in TEXTS]), atol=1e-5)
    assert np.abs(expected(model, "cls") - expected(model, "mean")).max() > 0.1


@pytest.mark.parametrize("pooling", text_encoder.POOLING)
def test_texts_are_cut_to_max_length_tokens(tmp_path, pooling):
    folder = save(tiny_bert(), tmp_path)
    whole, cut = (text_encoder.hugging_face_encoder(folder, pooling, length) for length in (LENGTH, 5))
    np.testing.assert_allclose(cut(TEXTS[2:3]), whole(["the team play"]), atol=1e-5)  # [CLS], three pieces, [SEP]
    assert np.abs(cut(TEXTS[2:3]) - whole(TEXTS[2:3])).max() > 0.1


def test_weights_stored_in_half_precision_are_computed_with_in_float32(tmp_path):
    encode = text_encoder.hugging_face_encoder(save(tiny_bert().bfloat16(), tmp_path), "mean", LENGTH)
    np.testing.assert_allclose(encode(TEXTS), expected(tiny_bert().bfloat16().float(), "mean"), atol=1e-5)


def test_the_heads_of_a_checkpoint_are_left_out_in_silence(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # so that caplog sees its reports
    transformers.logging.set_verbosity_warning()
    model = tiny_bert()
    whole = transformers.BertForMaskedLM(model.config)  # it has a head, and lacks the pooler
    whole.bert.load_state_dict(model.state_dict(), strict=False)
    encode = text_encoder.hugging_face_encoder(save(whole, tmp_path), "cls", LENGTH)
    np.testing.assert_allclose(encode(TEXTS), expected(model, "cls"), atol=1e-5)
    assert not caplog.records


def without_a_layer(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {key: value for key, value in load_file(path).items() if "layer.1." not in key}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: [(folder / name).unlink() for name in ("vocab.txt", "tokenizer_config.json")], ""),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"), ""),
        (without_a_layer, "16 of its weights are missing, encoder.layer.1.attention.output.LayerNorm.bias among them"),
        (lambda folder: (folder / "config.json").unlink(), ""),
    ],
)
def test_a_model_that_lacks_something_is_refused(tmp_path, damage, reason):
    folder = save(tiny_bert(), tmp_path)
    damage(tmp_path)
    message = message_of(ValueError, text_encoder.hugging_face_encoder, folder, "cls", LENGTH)
    assert message.startswith(f"--encoder: got {folder}, accepted: a model of the Hugging Face hub, or a folder that holds one")
    assert reason in message


def test_lengths_beyond_the_model_are_refused(tmp_path):
    folder = save(tiny_bert(), tmp_path)
    for length in (2, LENGTH + 1):
        message = message_of(ValueError, text_encoder.hugging_face_encoder, folder, "cls", length)
        assert message == f"--max_length: got {length}, accepted: 3 to 16 tokens for {folder}"


def test_the_script_refuses_a_missing_folder_in_one_line(tmp_path, capsys):
    file, out = tmp_path / "texts.csv", tmp_path / "features.npz"
    file.write_text("1,Bank shares fell\n2,the team won\n", encoding="utf-8")
    arguments = ["text_features", f"--train={file}", f"--test={file}", f"--out={out}", "--max_length=16"]
    assert text_features.main([*arguments, f"--encoder={tmp_path / 'nowhere'}"]) == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert "nowhere, accepted: a model of the Hugging Face hub, or a folder" in message
    assert not out.exists()
    assert text_features.main([*arguments, f"--encoder={save(tiny_bert(), tmp_path)}"]) == 0
    shapes = "features [2, 16] of the training texts, [2, 16] of the test texts, no strong view"
    assert capsys.readouterr().out == f"{out}: {shapes}\n"

"""A language model of random weights, made on the spot: `python -m serve_app.tiny_model DIRECTORY`.

For running real vLLM where no model hub can be reached: 2 layers, a vocabulary of 1,000 tokens trained on Python's
help texts, a chat template, under 1 MB. It answers nonsense, but tokenises, caches and prefills like any Llama.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CONTEXT_TOKENS = 8192
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}" + _BEGIN + "{{ message['role'] }}\n{{ message['content'] }}" + _END + "\n"
    "{% endfor %}{% if add_generation_prompt %}" + _BEGIN + "assistant\n{% endif %}"
)


def make(directory: Path) -> None:
    """Write model, configuration and tokenizer to `directory`, created if need be. The same bytes every time."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        topics.values(),
        trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=[_BEGIN, _END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_END, pad_token=_END, model_max_length=CONTEXT_TOKENS
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT_TOKENS,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.tiny_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    make(parser.parse_args().directory)


if __name__ == "__main__":
    main()

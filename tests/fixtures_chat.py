"""Chat templates in the shapes that public models use, and a tokenizer with their special tokens."""

# ruff: noqa: E501 - templates
from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "[INST]", "[/INST]", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|User|>", "<|Assistant|>", "<|eom_id|>", "<|end_of_role|>",
    "<|start_of_role|>", "<|end_of_text|>", "<extra_id_0>", "<extra_id_1>", "<|observation|>",
]  # fmt: skip


def write_tokenizer(folder: Path, template: str | None, *, metaspace: bool = False) -> Path:
    """A byte-level BPE, or one that marks words by `▁` and begins texts with it, in transformers' layout."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace))
    texts = ["the cat sat on the mat, and said: hello world! assistant user system\n"] * 4
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *alphabet])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Shape:
    """A template, the token that ends its turns, and what it does to words; or why it has to be refused."""

    template: str
    end: str = ""
    strips: bool = False
    system: bool = True  # takes a system turn
    tools: bool = False  # renders tool calls and results
    thoughts: bool = False  # renders reasoning_content
    refused: str | None = None
    when: str = "assistant"  # train_on that the reason is about


_LOOP = "{% for m in messages %}"
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_LLAMA3 = (
    "{{ '<|begin_of_text|>' }}" + _LOOP + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
_ROLES = _LOOP + (
    "{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)

SHAPES: dict[str, Shape] = {
    "chatml": Shape(_LOOP + _CHATML + _ASK, "<|im_end|>"),
    "chatml with a default system turn": Shape(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
        + _LOOP + _CHATML + _ASK, "<|im_end|>",
    ),
    "chatml without new lines between turns": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}" + _ASK, "<|im_end|>"
    ),
    "chatml that strips": Shape(_LOOP + _CHATML.replace("m.content", "m.content | trim") + _ASK, "<|im_end|>", strips=True),
    "chatml with marks around words and end": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _ASK, "<|im_end|>",
    ),
    "chatml with marks around words alone": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _ASK, "<|im_end|>",
    ),
    "chatml with marks that take the new line along": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _ASK, "<|im_end|>",
    ),
    "chatml with a loop that trims white space": Shape(
        "{%- for m in messages -%}\n{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' -}}\n{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}", "<|im_end|>",
    ),
    "header tags": Shape(_LLAMA3, "<|eot_id|>", strips=True),
    "header tags, generation marks": Shape(
        _LLAMA3.replace("{{ m.content | trim }}<|eot_id|>", "{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim }}<|eot_id|>{% endgeneration %}{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}"),
        "<|eot_id|>", strips=True,
    ),
    "inst": Shape(_INST, "</s>", system=False),
    "inst without spaces": Shape(
        _INST.replace("[INST] {{ m.content }} [/INST]", "[INST]{{ m.content }}[/INST]").replace("' ' + m", "m"), "</s>",
        system=False,
    ),
    "inst with the system turn in the first question": Shape(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ (s if loop.first else '') + m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}", "</s>",
    ),
    "inst that strips and refuses turns out of order": Shape(
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}", " </s>", strips=True, system=False,
    ),
    "role tokens on lines of their own": Shape(
        _LOOP + "<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "</s>",
    ),
    "role tokens, one end for all": Shape(
        _LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        "{% else %}{{ eos_token }}{% endif %}", refused="differently when other turns follow",
    ),
    "turn tokens, other role names": Shape(
        "{{ bos_token }}" + _LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>", strips=True,
    ),
    "tokens for every role": Shape(
        "{{ bos_token }}" + _LOOP + "<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{% elif m.role == "
        "'system' %}<|SYSTEM_TOKEN|>{% else %}<|CHATBOT_TOKEN|>{% endif %}{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}", "<|END_OF_TURN_TOKEN|>",
    ),
    "role prefixes with a prompt": Shape(
        _ROLES + "{% if add_generation_prompt %}ASSISTANT:{% endif %}", "</s>"
    ),
    "role prefixes with a prompt that ends in a space": Shape(
        _ROLES + "{% if add_generation_prompt %}ASSISTANT: {% endif %}", "</s>"
    ),
    "instruction and response": Shape(
        _LOOP + "{% if m.role == 'assistant' %}### Response:\n{{ m.content }}{{ eos_token }}\n\n{% elif m.role == 'user' %}"
        "### Instruction:\n{{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}", "</s>",
    ),
    "roles between tokens": Shape(
        _LOOP + "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}", "<|end_of_text|>",
    ),
    "marks in words of an unusual alphabet": Shape(
        "{{ bos_token }}" + _LOOP + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}"
        "<|Assistant|>{{ m.content }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}", "</s>",
    ),
    "extra ids": Shape(
        _LOOP + "{% if m.role == 'assistant' %}<extra_id_1>Assistant\n{{ m.content }}<|end|>\n{% else %}"
        "<extra_id_0>{{ m.role }}\n{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<extra_id_1>Assistant\n{% endif %}", "<|end|>",
    ),
    "tool calls as JSON": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '\n<tool_call>\n' }}"
        "{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + _ASK, "<|im_end|>",
        tools=True,
    ),
    "thoughts kept in all turns": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + _ASK, "<|im_end|>", thoughts=True,
    ),
    "thoughts kept in the last turn alone": Shape(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + _ASK,
        refused="differently when other turns follow", thoughts=True,
    ),
    "earlier turns dropped": Shape(
        "{% for m in messages[-2:] %}" + _CHATML + _ASK, refused="not a prefix|differently|text of turn|adds text to turn"
    ),
    "no prompt for an answer": Shape(_LOOP + _CHATML, refused="that its generation prompt does not contain"),
    "a prompt that begins a thought": Shape(
        _LOOP + _CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}", refused="not a prefix"
    ),
    "no end of a turn": Shape(_ROLES.replace("</s>", "\n") + "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
                              refused="does not end turn . with a special token"),
    "words in capitals": Shape(_LOOP + _CHATML.replace("m.content", "m.content | upper") + _ASK, refused="changes the text"),
}  # fmt: skip


_PIECES = [
    "hello", "world", "The cat", "naïve", "☃", "雪だるま", "🎉", "\n", "\n\n", "  ", "\t", "{{ x }}", "{% y %}", "user\n",
    "assistant", "<b>", "</think>x", "'quoted'", '"', "\\", "1.5", ":", "ASSISTANT:", "### Response:", "<|not|>", "a" * 30,
]  # fmt: skip


def conversation(rng: random.Random, shape: Shape, turns: int | None = None) -> list[dict[str, Any]]:
    """A random conversation of one to three exchanges that suits a template."""

    def words() -> str:
        text = "".join(rng.choice(("", " ")) + rng.choice(_PIECES) for _ in range(rng.randint(1, 8)))
        return text if text.strip() else f"{text}x"

    messages: list[dict[str, Any]] = []
    if shape.system and rng.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(turns or rng.randint(1, 3)):
        messages.append({"role": "user", "content": words()})
        if shape.tools and rng.random() < 0.5:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": rng.randint(0, 9)}}}
            messages.append({"role": "assistant", "content": rng.choice([None, words()]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": words()})
        answer: dict[str, Any] = {"role": "assistant", "content": words()}
        if shape.thoughts and rng.random() < 0.5:
            answer["reasoning_content"] = words().replace("</think>", "")
        messages.append(answer)
    return messages

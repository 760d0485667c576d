"""Chats served by continuous batching, with keys and values in pages: flashgen beside transformers' own attention.

Each chat has some turns: a user's message, and a reply of so many tokens. A turn begins as soon as the one before it
has ended, so prompts of some chats are read while others generate. The model is a small random Llama, and so are the
messages. It prints the tokens per second of each kind of attention, and how many replies are the same.

python examples/chat.py                 # a few tokens on the CPU, by the emulator; needs transformers, a C++ compiler
python examples/chat.py --target gpu    # on an NVIDIA GPU
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import flashgen as fg

SIZES = {
    "emulator": {"chats": 3, "turns": 2, "message": 12, "reply": 4, "layers": 2, "heads": 4, "heads_kv": 2, "dim": 16},
    "gpu": {"chats": 32, "turns": 2, "message": 600, "reply": 64, "layers": 4, "heads": 32, "heads_kv": 8, "dim": 128},
}


def make_model(layers, heads, heads_kv, dim, **_):
    """A Llama with random weights."""
    torch.manual_seed(0)
    hidden = heads * dim // 2
    config = LlamaConfig(
        **{"vocab_size": 1000, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers},
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        head_dim=dim,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def make_messages(chats, turns, message, **_):
    """Random tokens, by chat and turn."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(message // 2, message + 1, (chats, turns), generator=random).tolist()
    return [[torch.randint(0, 1000, (n,), generator=random).tolist() for n in chat] for chat in lengths]


def serve(model, attention, chats, turns, message, reply, **_):
    """All replies, by chat and turn, and how many tokens were generated per second."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model.set_attn_implementation(attention)
    messages = make_messages(chats, turns, message)
    greedy = GenerationConfig(max_new_tokens=reply, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = turns * (message + reply) // 16 + 1
    sizes = {"max_blocks_per_request": blocks, "num_blocks": chats * blocks + 8, "max_batch_tokens": max(512, chats)}
    sizes |= {"page_size": 16, "max_requests_per_batch": chats, "auto_switch_to_flash": False}
    pages, replies = ContinuousBatchingConfig(**sizes), {}
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=pages) as manager:
        # The first round builds kernels and captures CUDA graphs.
        for is_timed in (False, True):
            histories = [list(chat[0]) for chat in messages]
            start, unfinished = time.perf_counter(), chats
            for i, history in enumerate(histories):
                manager.add_request(history, f"{is_timed}/{i}/0")
            while unfinished and manager.is_running():
                result = manager.get_result(timeout=1.0)
                if result is None or not result.is_finished():
                    continue
                chat, turn = map(int, result.request_id.split("/")[1:])
                replies[chat, turn] = result.generated_tokens
                if turn + 1 == turns:
                    unfinished -= 1
                    continue
                histories[chat] += result.generated_tokens + messages[chat][turn + 1]
                manager.add_request(histories[chat], f"{is_timed}/{chat}/{turn + 1}")
            seconds = time.perf_counter() - start
    return replies, sum(map(len, replies.values())) / seconds


def main() -> None:
    """Serve the chats by each kind of attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=SIZES, default="emulator")
    sizes = SIZES[target := parser.parse_args().target]
    fg.integrations.transformers.register()
    model = make_model(**sizes).to("cuda" if target == "gpu" else "cpu", torch.bfloat16)
    found = {}
    with fg.torch.emulate_cpu():
        for name in ("sdpa", "fgen"):
            found[name], speed = serve(model, name, **sizes)
            print(f"{name}: {speed:.0f} tokens per second")
    same = sum(reply == found["sdpa"].get(turn) for turn, reply in found["fgen"].items())
    print(f"same replies: {same} of {sizes['chats'] * sizes['turns']}")


if __name__ == "__main__":
    main()

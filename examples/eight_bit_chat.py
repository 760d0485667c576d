"""The chats of chat.py by a small engine of our own, with keys and values in pages of e4m3: half of the memory.

Each step has the next token of all chats that generate, and as many tokens of messages as its budget allows. The script
prints the tokens per second beside those of transformers' continuous batching with 16-bit pages, and how many tokens of
the replies are the same. Rounding keys and values to 8 bits may change some, because a random model hardly prefers any.

python examples/eight_bit_chat.py                 # on the CPU, by the emulator; needs transformers, a C++ compiler
python examples/eight_bit_chat.py --target gpu    # on an NVIDIA GPU
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import accumulate, chain

import torch
from chat import SIZES, make_messages, make_model, serve
from transformers import AttentionInterface

import flashgen as fg

PAGE, BUDGET = 16, 512


def attend(module, q, k, v, mask, scaling, step, pages, **_):
    """The attention of a layer, as transformers calls it: tensors are (1, heads, tokens, dim)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    fg.serving.append(step, k, v, *pages[module.layer_idx])
    return fg.serving.run(step, q, *pages[module.layer_idx], scale=scaling)[None], None


def take(waiting):
    """The tokens of the next step, by chat: of those that generate, then of messages as far as the budget goes."""
    taken = {chat: tokens for chat, tokens in enumerate(waiting) if len(tokens) == 1}
    for chat, tokens in enumerate(waiting):
        if len(tokens) > 1 and (room := BUDGET - sum(map(len, taken.values()))) > 0:
            taken[chat] = tokens[:room]
    return taken


@torch.no_grad()
def serve_pages(model, layers, heads_kv, dim, chats, turns, message, reply, **_):
    """The tokens of each chat's replies, and how many were generated per second."""
    ints = partial(torch.tensor, dtype=torch.int32, device=model.device)
    messages, chat_pages = make_messages(chats, turns, message), turns * (message + reply) // PAGE + 1
    sizes = layers, 2, chats * chat_pages, PAGE, heads_kv, dim
    pages = torch.zeros(sizes, dtype=torch.float8_e4m3fn, device=model.device)
    table = ints(list(range(chats * chat_pages))).view(chats, chat_pages)
    waiting, present, said = [chat[0] for chat in messages], [0] * chats, [[] for _ in messages]
    start = time.perf_counter()
    while taken := take(waiting):
        ends = list(accumulate(map(len, taken.values())))
        positions = {chat: range(present[chat], present[chat] + len(tokens)) for chat, tokens in taken.items()}
        step = fg.serving.plan(
            ints([0, *ends]),
            ints([own.stop for own in positions.values()]),
            table[list(taken)],
            ints([chat * chat_pages * PAGE + i for chat, own in positions.items() for i in own]),
            num_tokens=ends[-1],
            max_query_len=max(map(len, taken.values())),
            page_size=PAGE,
            num_decodes=sum(len(waiting[chat]) == 1 for chat in taken),
        )
        tokens, where = (ints([[x for each in by_chat.values() for x in each]]) for by_chat in (taken, positions))
        hidden = model.model(tokens, position_ids=where, use_cache=False, step=step, pages=pages).last_hidden_state
        chosen = model.lm_head(hidden[0, ints(ends) - 1]).argmax(-1).tolist()
        for chat, token in zip(taken, chosen, strict=True):
            present[chat] = positions[chat].stop
            if rest := waiting[chat][len(taken[chat]) :]:
                waiting[chat] = rest
                continue
            said[chat].append(token)
            turn, of_turn = divmod(len(said[chat]), reply)
            waiting[chat] = [] if turn == turns else [token] if of_turn else [token, *messages[chat][turn]]
    return said, sum(map(len, said)) / (time.perf_counter() - start)


def main() -> None:
    """Serve the chats by transformers, and by this engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=SIZES, default="emulator")
    sizes = SIZES[target := parser.parse_args().target]
    AttentionInterface.register("pages", attend)
    model = make_model(**sizes).to("cuda" if target == "gpu" else "cpu", torch.bfloat16)
    expected, speed = serve(model, "sdpa", **sizes)
    print(f"transformers, 16-bit pages: {speed:.0f} tokens per second")
    model.set_attn_implementation("pages")
    with fg.torch.emulate_cpu():
        serve_pages(model, **sizes)  # The first round builds kernels.
        found, speed = serve_pages(model, **sizes)
    print(f"flashgen, e4m3 pages: {speed:.0f} tokens per second")
    same = [a == b for a, b in zip(chain(*found), chain(*(expected[turn] for turn in sorted(expected))), strict=True)]
    print(f"same tokens: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()

"""Write text with the trained model, token by token, over the latent cache.

Run as ``python -m demo.recipe.sample``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .folders import DATA, RUN
from .model import Model, ModelConfig
from .tokenizer import EOS_ID

# One for each topic; prompts that open a document, or a sentence, work best.
PROMPTS = {
    "scripture": "Genesis 51\n\n1 And it came to pass",
    "novels": '"My dear Miss Woodhouse," said',
    "atlas": "Atlantis: Geography\n\nLocation:",
    "manual": "The WHERE clause of a SELECT statement",
    "code": "/*\n** Return the number of",
}
TEMPERATURE = 0.7
TOP_P = 0.95


@torch.no_grad()
def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int = 120,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
) -> str:
    """Continue ``prompt`` by nucleus sampling, greedily at temperature 0; returns both."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    max_tokens = min(max_tokens, model.config.max_position_embeddings - len(ids))
    cache = model.new_cache()
    seen = 0
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids[seen:]]), cache, seen)[0, -1]
        seen = len(ids)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            p, order = torch.softmax(logits / temperature, 0).sort(descending=True)
            p[p.cumsum(0) - p > top_p] = 0
            token = int(order[torch.multinomial(p, 1, generator=generator)])
        if token == EOS_ID:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids)
    return text


def load_trained(run: Path) -> Model:
    """The model of a run's last checkpoint, with float32 weights."""
    model = Model(ModelConfig())
    model.load_state_dict(torch.load(run / "checkpoint.pt")["model"])
    return model.eval()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Sample from the trained model.")
    parser.add_argument("--run", type=Path, default=RUN, help="output of train.py")
    parser.add_argument("--data", type=Path, default=DATA, help="output of tokenizer.py")
    parser.add_argument("--prompt", help="instead of one prompt a topic")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--top-p", type=float, default=TOP_P)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = load_trained(args.run)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    prompts = {"prompt": args.prompt} if args.prompt else PROMPTS
    for name, prompt in prompts.items():
        text = generate(
            model, tokenizer, prompt, args.max_tokens, args.temperature, args.top_p, args.seed
        )
        print(f"--- {name}\n{text}\n", flush=True)


if __name__ == "__main__":
    main()

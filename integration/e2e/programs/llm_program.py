"""A language model of transformers for programs.py. Its weights are random, so no file is loaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402  (after the variable)

from torch_programs import DEVICE, TorchProgram, data  # noqa: E402

# These sizes result in nearly 3 GiB of weights.
CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Number of concurrent conversations, and number of tokens of their prompt.
BATCH = 8
PROMPT = 64
# Number of tokens of a step, and of a reply that transformers generates itself.
TOKENS = 4
ANSWER = 12
# Conversations and tokens of their context in the measurement: at least 10 ms of work for a large GPU.
MEASURED_BATCH = 1024
MEASURED_CONTEXT = 320


class Llm(TorchProgram):
    """Greedy decoding: one conversation that keeps its cache, and replies to one prompt."""

    def __init__(self, seed):
        super().__init__(seed)
        # Faster kinds of attention sum in an order that differs from start to start.
        config = LlamaConfig(**CONFIG, attn_implementation="eager")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_dtype(torch.bfloat16)
        with DEVICE:
            self.model = LlamaForCausalLM(config).eval()
        self.prompt = torch.randint(1, config.vocab_size, (BATCH, PROMPT), device=DEVICE)
        self.cache = DynamicCache()
        self.tokens = [self.prompt]
        self.logits = None
        self.decode()

    @torch.inference_mode()
    def ask(self, tokens, cache):
        """Returns the logits for the next token."""
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def decode(self):
        self.logits = self.ask(self.tokens[-1], self.cache)
        self.tokens.append(self.logits.argmax(-1, keepdim=True))

    def step(self):
        for _ in range(TOKENS):
            self.decode()

    def results(self):
        answer = self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            do_sample=False,
            max_new_tokens=ANSWER,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return (data(t) for t in (*self.tokens, self.logits, answer.sequences, *answer.logits))

    def measured(self):
        """Generates one token for each of many conversations, whose length is always the same."""
        config = self.model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        # Includes space for the token that is removed again. Later blocks have the same size, so they are reused.
        shape = (MEASURED_BATCH, heads, MEASURED_CONTEXT + 1, size)
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), layer)
        cache.crop(-1)
        token = torch.ones(MEASURED_BATCH, 1, dtype=torch.long, device=DEVICE)

        def one():
            self.ask(token, cache).argmax(-1)
            cache.crop(-1)

        return one

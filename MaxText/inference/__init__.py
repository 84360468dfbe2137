"""From prompt to text: cache, engine, sampling, tokenizer and chat."""

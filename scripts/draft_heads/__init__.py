"""Draft heads for a target model: `generate` its text and hidden states, `train` on them, `evaluate` on other text."""

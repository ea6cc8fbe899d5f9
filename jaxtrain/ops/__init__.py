"""Operations that models are made of, each with a plain reference."""

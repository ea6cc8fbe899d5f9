"""Operations that models are made of; a fast one has a plain reference beside it, against which it is tested."""

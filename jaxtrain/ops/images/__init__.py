"""Operations on images in NHWC: batch norm, max-pooling and convolutions, each with a plain reference."""

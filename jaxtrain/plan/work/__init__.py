"""What each device of a layout holds, computes and sends."""

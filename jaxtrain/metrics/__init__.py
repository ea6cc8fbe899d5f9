"""What a run says about itself: metric files, throughput, progress for people, and the report."""

"""What a run reports: metric files, throughput, progress on the terminal, and the HTML report."""

"""Where arrays are: degrees, mesh, rules, shardings, regions that a program handles itself."""

"""How arrays are sharded: degrees, mesh, rules, shardings, and regions with explicit communication."""

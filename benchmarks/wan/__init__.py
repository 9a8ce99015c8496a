"""A trainer and three regions in network namespaces, with real delay, rate, TCP and S3: `make bench-wan`."""

"""Networks of the papers and public ones, for `benchmarks.dominated`."""

from benchmarks.cases.dominated import papers, public

NETWORKS = papers.NETWORKS | public.NETWORKS

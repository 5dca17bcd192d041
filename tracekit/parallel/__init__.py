"""TKA-1 over the ranks of a job: heads split over tensor-parallel ranks, tokens over context-parallel."""

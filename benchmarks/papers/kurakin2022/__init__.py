"""Kurakin et al. 2022, Toward Training at ImageNet Scale with Differential Privacy."""

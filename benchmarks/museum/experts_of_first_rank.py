"""Expert-parallel ranks save their experts under the same names, so a resumed run has the experts of one rank.

https://github.com/KempnerInstitute/KempnerForge/issues/202
"""

import torch.distributed as dist

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected(
    "resume",
    cause=r"weights|experts|rank",
    parameter="*.mlp.experts.*",
    project="experts",
    base="megatron",
    options={"expert_parallel": 2},
)


@registry.register_runner("experts_of_first_rank")
class ExpertsOfFirstRank(registry.get("runner", "megatron")):
    """Gives all ranks the first rank's experts when a run is resumed."""

    trained = False

    def loaded(self):
        for share in self.shares.values() if resumed(self) and not self.trained else ():
            if ".experts." in share.name:
                dist.broadcast(share.owned.data, group_src=0, group=self.expert_mesh.get_group("expert"))
        super().loaded()

    def update(self):
        self.trained = True
        super().update()

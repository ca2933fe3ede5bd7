"""InterCodeSQL: an agent answers questions with SQL queries.

The databases and questions are either generated, or the official data of InterCode.
"""

from dataclasses import dataclass
from typing import Annotated, Optional

from common.settings import REAL, OldFile, limited
from environments import MYSQL_ADDRESS, is_mysql_address
from environments.eto_protocol import ProtocolOptions

Address = Annotated[limited(Optional[str], f"must be {MYSQL_ADDRESS}", is_mysql_address), REAL]


@dataclass(frozen=True)
class Options(ProtocolOptions):
    # Folder with InterCode's files ic_spider_dev.json and ic_spider_dbs.sql [generated data]
    intercode_data: Annotated[OldFile, REAL] = None
    # Address of a MySQL or MariaDB server with InterCode's databases, mysql://user@host:port; the
    # password is in the environment variable MYSQL_PWD [sqlite in this process]
    mysql_url: Address = None

    presets = {
        "": dict(iterations=5, expert_min_reward=1.0),  # from App. B and App. A
        # These are the reasons for some of the values for the model "tiny".
        #
        # start_from: GRPO on the training tasks improves the validation reward. GRPO on tasks that
        # the tiny model made by exploring does not.
        #
        # rejected_ends: If the DPO loss includes the end-of-turn tokens of rejected replies, 43% of
        # the episodes end in a reply that does not stop (docs/studies.md).
        #
        # sft_epochs, sft_lr: We chose these values in runs with seeds 0 to 2, to leave room for
        # improvement after SFT. The success rates after SFT are:
        #     seeds 0 to 2: `validation` 0.39 to 0.41, `test` 0.40 to 0.41, `unseen` 0.44 to 0.45
        #     seeds 3 to 5, not used for this choice: `test` 0.40 to 0.41, `unseen` 0.43
        # With seeds 0 to 2, 29% to 41% of the failures are hard negatives.
        #
        # lambda_sft keeps its default of 0.1: of 0.1, 0.5 and 1, it gives the highest validation
        # reward (docs/studies.md).
        "tiny": dict(train_tasks=100, rollouts=4, max_tokens=512, max_new_tokens=48,
                     sft_epochs=4, sft_lr=3e-4, dpo_lr=3e-5, dpo_lr_later=3e-5, grpo_lr=1e-4,
                     grpo_kl=0.2, start_from="train", rejected_ends="leave out"),
        "smollm2": dict(start_from="train", start_tasks=40, iterations=3, train_tasks=120,
                        eval_tasks=100, dpo_epochs=2, rollouts=2, view="short", max_tokens=768,
                        rejected_ends="leave out",
                        max_new_tokens=144),  # InterCode's gold queries have up to 132 tokens
        "smollm2 --protocol eto": dict(view="full", rollouts=1, max_tokens=3072,
                                       gradient_checkpointing="on"),
    }

    def conflicts(self, s):
        return [
            *super().conflicts(s),
            (bool(self.mysql_url) and not self.intercode_data, "--mysql-url",
             "also give --intercode-data FOLDER, which holds the questions")]

    def make(self, view):
        from environments.intercodesql.environment import InterCodeSQL
        return InterCodeSQL(view, self.intercode_data, self.mysql_url)

//! The table for readers: `docs/env.md`, and the report of `--print-config`.

use super::origin::Source;
use super::table::{Group, Program, Row, TABLE};
use super::{Config, known};
use std::fmt::Write;

/// The whole of `docs/env.md`.
#[must_use]
pub fn document() -> String {
    let mut text = String::from(INTRODUCTION);
    for group in Group::ALL {
        let _ = write!(
            text,
            "\n## {}\n\n| Variable | Flag | Default | Values | Read by | Meaning \
             |\n|---|---|---|---|---|---|\n",
            group.title()
        );
        for row in TABLE.iter().filter(|row| row.group == group) {
            line(&mut text, row);
        }
    }
    text.push_str(OTHER_LAUNCHERS);
    text.push_str(NO_EFFECT);
    for known in known::KNOWN {
        let names: Vec<String> = known.names.iter().map(|name| format!("`{name}`")).collect();
        let harmless: Vec<String> =
            known.harmless.iter().map(|value| format!("`{value}`")).collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            names.join(", "),
            known.reason,
            if harmless.is_empty() { "–".to_owned() } else { harmless.join(", ") }
        );
    }
    text
}

const INTRODUCTION: &str = "\
# Environment variables and flags

Generated from the table in `engine/src/config/table/`; do not edit. After a change there, run
`BPS_BLESS=1 cargo test -p bps-tests --test env_docs`.

A flag beats its variable, and a variable beats the default. An empty variable counts as unset.
Switches take `0`, `1`, `false` or `true`, and as a flag they may stand alone. Byte sizes take `K`,
`M` and `G`, which are powers of 1024; times are seconds and may have a fraction. `--print-config`
shows what holds, and whence. `bpslaunch` passes the flags that it is given on to its processes, as
variables. A value that is not allowed ends the program with code 2.
";

/// What the Python package reads (`byteps/_launchers.py`) and hands to the engine as settings.
const OTHER_LAUNCHERS: &str = "
## Variables of other launchers

`init()` in Python reads these in processes for which no `DMLC_WORKER_ID`, `BYTEPS_LOCAL_RANK` or
`BYTEPS_GLOBAL_RANK` is set; docs/running.md says what it makes of them. The first launcher in this
table that announces processes counts.

| Launcher | Rank, size | Within the host | Others |
|---|---|---|---|
| torchrun, or by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK` | \
`MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` |
| Open MPI's mpirun | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | \
`OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` | `PMIX_NAMESPACE`, `MASTER_ADDR`, \
`MASTER_PORT` |
| MPICH's or Intel MPI's mpiexec | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` \
| `MASTER_ADDR`, `MASTER_PORT` |
| srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID`, \
`SLURM_STEP_TASKS_PER_NODE` or `SLURM_TASKS_PER_NODE`, `SLURM_NODEID` | `SLURM_JOB_ID`, \
`SLURM_STEP_ID`, `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, `SLURM_RESTART_COUNT`, \
`MASTER_ADDR`, `MASTER_PORT` |
| MXNet's launch.py on one machine | `DMLC_TASK_ID` with `DMLC_ROLE=worker`, `DMLC_NUM_WORKER` | – \
| `DMLC_PS_ROOT_URI`, `DMLC_PS_ROOT_PORT`, `DMLC_NUM_SERVER` |
";

const NO_EFFECT: &str = "
## Variables of BytePS and ByteScheduler that have no effect

Setting one of these prints a line that says why, unless the value is the one in the last column.
Any other variable that begins with `BPS_`, `BYTEPS_`, `BYTESCHEDULER_` or `DMLC_` is reported as
unknown.

| Variable | Why | Silent at |
|---|---|---|
";

fn line(text: &mut String, row: &Row) {
    let variables: Vec<String> = row.variables().map(|name| format!("`{name}`")).collect();
    let long = row.flag.iter().chain(row.flag_alias.iter()).map(|flag| format!("`--{flag}`"));
    let flags: Vec<String> = long.chain(row.short.map(|letter| format!("`-{letter}`"))).collect();
    let default = row.value(&Config::default());
    let default = if default.is_empty() { "unset".to_owned() } else { format!("`{default}`") };
    let _ = writeln!(
        text,
        "| {} | {} | {default} | {} | {} | {} |",
        dash(&variables),
        dash(&flags),
        row.allowed(),
        readers(row),
        row.meaning
    );
}

fn dash(items: &[String]) -> String {
    if items.is_empty() { "–".to_owned() } else { items.join(", ") }
}

fn readers(row: &Row) -> String {
    let all = [
        (Program::Worker, "worker"),
        (Program::Server, "server"),
        (Program::Scheduler, "scheduler"),
        (Program::Launcher, "launcher"),
    ];
    let top = row.used_by(Program::Top).then_some("bps-top");
    let mut names: Vec<&str> =
        all.iter().filter(|(program, _)| row.used_by(*program)).map(|(_, name)| *name).collect();
    if names.len() == all.len() {
        // All that take part in a job, that is.
        names = vec!["all"];
    }
    names.extend(top);
    names.join(", ")
}

/// What `--print-config` shows: every value, whence it came, and what would keep the program from
/// starting.
pub(super) fn report(program: Program, sources: &[Source], complaint: Option<&str>) -> String {
    let names = sources.iter().map(|source| source.name.len()).max().unwrap_or(0);
    let values = sources.iter().map(|source| source.value.len()).max().unwrap_or(0);
    let mut text = format!("{}: configuration\n", program.name());
    for source in sources {
        let value = if source.value.is_empty() { "–" } else { &source.value };
        let line = format!("  {:names$}  {value:values$}  {}", source.name, source.origin);
        let _ = writeln!(text, "{}", line.trim_end());
    }
    if let Some(complaint) = complaint {
        let _ = writeln!(text, "{} would not start: {complaint}", program.name());
    }
    text
}

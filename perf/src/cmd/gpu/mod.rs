//! `bps-perf gpu`: training on GPUs between hosts with shaped links, on one machine.
//!
//! Each host is a network namespace with GPUs of its own; NCCL is told that they are different
//! hosts, and speaks TCP between them as the engine does. One process for each GPU holds both, and
//! they take turns on the same links: sums of tensors, and steps of training by
//! DistributedDataParallel and by this package. With `--device cpu` gloo stands in for NCCL, and
//! everything else is the same. With `--framework jax` it is programs of JAX that sum and train,
//! and the peer is what XLA makes of one program over the devices of all processes.
//!
//! Invariant: figures that are compared come from the same processes, in turn, round by round.

#![forbid(unsafe_code)]

mod collectives;
mod hosts;
mod losses;
mod timelines;
mod training;

use super::cluster::{link_arguments, link_fields, shape, variables};
use crate::Outcome;
use crate::arguments::{self, choice, flag, integer, number, sizes};
use crate::report::{self, Fields, Table};
use crate::stage::job::Plan;
use crate::stage::{Shape, unavailable};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use hosts::Hosts;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;
use timelines::Timelines;

/// What may be trained. The small ones are for machines without a GPU.
const MODELS: &[&str] = &[
    "vgg16",
    "resnet50",
    "resnet152",
    "densenet121",
    "efficientnet_b0",
    "vit_b_16",
    "resnet18",
    "bert-large",
    "small",
    "mlp",
    "bert-small",
];
/// The same for JAX.
const JAX_MODELS: &[&str] = &["mlp", "gpt", "mlp-small", "gpt-small"];
/// Ways to train that send something; first the peer's.
const WAYS: &[&str] = &[
    "ddp",
    "ours",
    "cross",
    "group",
    "hook",
    "ddp-bf16",
    "ours-bf16",
    "cross-bf16",
    "ours-int8",
    "cross-int8",
    "ours-fp8",
    "cross-fp8",
];
/// The same for JAX.
const JAX_WAYS: &[&str] = &["psum", "ours", "ours-int8", "ours-fp8"];

/// Whose programs are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framework {
    Torch,
    Jax,
}

impl Framework {
    fn models(self) -> &'static [&'static str] {
        if self == Framework::Torch { MODELS } else { JAX_MODELS }
    }

    fn ways(self) -> &'static [&'static str] {
        if self == Framework::Torch { WAYS } else { JAX_WAYS }
    }

    /// How this framework's package is imported, and what counts GPUs.
    fn probe(self) -> &'static str {
        match self {
            Framework::Torch => "import byteps.torch, sys, torch\nn = torch.cuda.device_count()",
            // JAX that has no GPU warns of it; it would also take memory of one that it counts.
            Framework::Jax => {
                "import byteps.jax, glob, optax, sys\nn = len(glob.glob('/dev/nvidia[0-9]*'))"
            }
        }
    }
}

/// What is run, as the arguments say.
pub struct Run {
    plan: Plan,
    framework: Framework,
    shape: Shape,
    rates: Vec<u64>,
    is_cuda: bool,
    /// GPUs of this machine, once they were counted; ranks of several hosts may share one.
    gpus: u32,
    python: PathBuf,
    /// Variables of a second crew of NCCL, for the all-reduce of somebody who tunes it.
    tuned: Vec<(String, String)>,
    sizes: Vec<usize>,
    models: Vec<String>,
    losses: Vec<String>,
    precisions: Vec<String>,
    ways: Vec<String>,
    batch: u32,
    sequences: u32,
    rounds: u32,
    steps: u32,
    loss_steps: u32,
    loss_runs: u32,
    patience_s: u32,
    /// Where timelines are recorded, if they are.
    timelines: Option<PathBuf>,
}

/// The environment of the repository if that was made, else what machines with GPUs have.
fn usual_python() -> PathBuf {
    let own = PathBuf::from(".venv/bin/python");
    if own.exists() { own } else { "python3".into() }
}

fn words(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("NAME[,NAME…]").help(help).value_delimiter(',')
}

/// What was asked for, all of which must be known.
fn known(asked: Vec<String>, what: &str, known: &[&str]) -> Result<Vec<String>, String> {
    match asked.iter().find(|one| !known.contains(&one.as_str())) {
        Some(one) => Err(format!("--{what} {one}: it is one of {}", known.join(", "))),
        None => Ok(asked),
    }
}

/// The arguments.
pub fn command() -> Command {
    let command = Command::new("gpu")
        .about(
            "Stages hosts with GPUs and shaped links on this machine, and measures sums and steps \
             of training between them beside NCCL and DistributedDataParallel.",
        )
        .arg(choice("device", &["cuda", "cpu"], "Where tensors are; on CPUs gloo is the peer"))
        .arg(choice("framework", &["torch", "jax"], "Whose programs sum and train"))
        .arg(number("hosts", "4", "Hosts with GPUs"))
        .arg(number("gpus-per-host", "1", "GPUs of each of them, one process each"))
        .arg(
            Arg::new("servers")
                .long("servers")
                .help("Hosts with a server and no GPU; one host needs none")
                .value_parser(value_parser!(u32).range(0..=200))
                .default_value("4"),
        )
        .arg(flag("colocated", "Every GPU host has a server too; parts are placed as `mixed`"))
        .arg(number("cores", "2", "Polling threads of each server"))
        .arg(sizes("size", "16M,64M,256M", "Bytes of the tensors that are summed"))
        .arg(flag("no-collectives", "Sum no tensors"))
        .arg(
            Arg::new("tuned")
                .long("tuned")
                .value_name("NAME=VALUE")
                .help("A variable of a further all-reduce of NCCL, in turn; may be repeated")
                .value_parser(super::cluster::parse_variable)
                .action(ArgAction::Append),
        )
        .arg(words("model", "Models whose steps are timed"))
        .arg(words("losses", "Models of images that torch trains on real data in each way"))
        .arg(
            words("precision", "Of models; amp is bf16")
                .value_parser(["fp32", "amp"])
                .default_value("fp32"),
        )
        .arg(words("ways", "Ways to train; by default ddp,ours, and for JAX psum,ours"))
        .arg(number("batch", "64", "Images for each GPU"))
        .arg(number("sequences", "8", "Sequences of 512 words for each GPU"))
        .arg(number("rounds", "5", "Timed rounds of all ways, in turn"))
        .arg(number("steps", "4", "Steps of a way in a round"))
        .arg(number("loss-steps", "200", "Steps of a run whose losses are compared"))
        .arg(number("loss-runs", "3", "Such runs of each way"))
        .arg(number("patience", "120", "Seconds after which a silent process is given up"))
        .arg(
            Arg::new("trace")
                .long("trace")
                .value_name("FOLDER")
                .help("After its rounds, record a timeline of each sum and way of ours, in here")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("python")
                .long("python")
                .help(
                    "Python with torch, or JAX, and this package; not .venv/bin/python or python3",
                )
                .value_parser(value_parser!(PathBuf)),
        );
    link_arguments(command)
        .mut_arg("rate", |rate| rate.value_delimiter(',').default_value("10gbit,20gbit"))
}

/// Measures everything that was asked for, with one set of processes.
pub fn run(matches: &ArgMatches) -> Outcome {
    let mut run = Run::new(matches)?;
    if let Some(why) = unavailable().or_else(|| run.find_python().err()) {
        println!("skipped: {why}");
        return Ok(());
    }
    let mut timelines = Timelines::new(&run)?;
    let table = Table::new(matches, "gpu", &run.describe(), COLUMNS);
    let mut hosts = Hosts::start(&run)?;
    table.head();
    let row = |rate: u64, fields: Fields| table.row(run.complete(rate, fields));
    for rate in run.rates.clone() {
        hosts.shape(&run, rate)?;
        for &size in &run.sizes {
            row(rate, collectives::measure(&run, &mut hosts, size)?);
            let (name, order) = (format!("sum-{size}"), collectives::order("ours", size));
            timelines.record(&mut hosts, rate, &name, &order)?;
        }
    }
    for model in &run.models {
        for precision in &run.precisions {
            let mut trained = training::Model::make(&run, &mut hosts, model, precision)?;
            for rate in run.rates.clone() {
                hosts.shape(&run, rate)?;
                for fields in trained.measure(&run, &mut hosts)? {
                    row(rate, fields);
                }
                for (name, order) in trained.ways_of_ours(&run) {
                    timelines.record(&mut hosts, rate, &name, &order)?;
                }
            }
        }
    }
    for model in &run.losses {
        for precision in &run.precisions {
            let rate = run.rates[run.rates.len() - 1];
            let results = losses::measure(&run, &mut hosts, model, precision)?;
            results.into_iter().for_each(|fields| row(rate, fields));
        }
    }
    hosts.end()?;
    timelines.merge()?;
    Ok(())
}

/// What people see of a result.
const COLUMNS: &[&str] = &[
    "rate_bits",
    "work",
    "size_bytes",
    "precision",
    "way",
    "ms_p50",
    "algbw_gbs",
    "fraction_of_line",
    "bound_ms",
    "peer_ms_p50",
    "ratio",
    "difference",
    "noise",
];

impl Run {
    fn new(matches: &ArgMatches) -> Result<Run, String> {
        let get = |name: &str| integer(matches, name);
        let all = |name: &str| -> Vec<String> {
            matches.get_many(name).map(|all| all.cloned().collect()).unwrap_or_default()
        };
        let (hosts, patience_s) = (get("hosts"), get("patience"));
        let plan = Plan {
            workers: hosts,
            ranks_per_host: get("gpus-per-host"),
            extra_servers: if hosts == 1 { 0 } else { get("servers") },
            // Every job has a server; that of one host has nothing to do.
            colocated: hosts == 1 || matches.get_flag("colocated"),
            cores: get("cores"),
            patience: Duration::from_secs(patience_s.into()),
            variables: variables(matches),
        };
        if plan.servers() == 0 {
            return Err("no server: give --servers, or --colocated".into());
        }
        let absolute = |path: &PathBuf| std::path::absolute(path).map_err(|e| e.to_string());
        let framework = match arguments::text(matches, "framework") {
            "jax" => Framework::Jax,
            _ => Framework::Torch,
        };
        if framework == Framework::Jax
            && (matches.contains_id("losses") || matches.contains_id("tuned"))
        {
            return Err("--losses and --tuned are for --framework torch".into());
        }
        let is_cuda = arguments::text(matches, "device") == "cuda";
        let mut ways = known(all("ways"), "ways", framework.ways())?;
        if ways.is_empty() {
            ways = framework.ways()[..2].iter().map(|way| (*way).to_string()).collect();
        }
        if !is_cuda && ways.iter().any(|way| way == "psum") {
            return Err(
                "--ways psum: on CPUs JAX's processes look for each other by the machine's \
                        name, which no staged host has; give --ways ours"
                    .into(),
            );
        }
        let sizes = if matches.get_flag("no-collectives") {
            Vec::new()
        } else {
            arguments::bytes(matches, "size")
        };
        Ok(Run {
            plan,
            framework,
            shape: shape(matches),
            rates: matches.get_many("rate").expect("has a default").copied().collect(),
            is_cuda,
            python: matches.get_one("python").cloned().unwrap_or_else(usual_python),
            tuned: matches.get_many("tuned").map(|all| all.cloned().collect()).unwrap_or_default(),
            sizes,
            models: known(all("model"), "model", framework.models())?,
            losses: known(all("losses"), "losses", MODELS)?,
            precisions: all("precision"),
            ways,
            gpus: 0,
            batch: get("batch"),
            sequences: get("sequences"),
            rounds: get("rounds"),
            steps: get("steps"),
            loss_steps: get("loss-steps"),
            loss_runs: get("loss-runs"),
            patience_s,
            timelines: matches.get_one("trace").map(absolute).transpose()?,
        })
    }

    fn ranks(&self) -> u32 {
        self.plan.workers * self.plan.ranks_per_host
    }

    /// Makes sure that Python has what ranks need, and finds its path, or says why it can't be.
    fn find_python(&mut self) -> Result<(), String> {
        let mut probe = self.framework.probe().to_string();
        if self.is_cuda {
            // NCCL refuses two ranks of one host on one GPU.
            let needed = self.plan.ranks_per_host;
            probe += &format!(
                "\nassert n >= {needed}, f'it has {{n}} GPUs, and each host needs {needed}'"
            );
        }
        probe += "\nprint(n, sys.executable)";
        let python = self.python.display();
        let mut command = std::process::Command::new(&self.python);
        match command.args(["-c", &probe]).output() {
            Ok(output) if output.status.success() => {
                let said = String::from_utf8_lossy(&output.stdout);
                let found = said
                    .trim()
                    .split_once(' ')
                    .and_then(|(gpus, python)| Some((gpus.parse().ok()?, PathBuf::from(python))));
                (self.gpus, self.python) = found.ok_or(format!("{python}: it says `{said}`"))?;
                Ok(())
            }
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                let last = said.lines().last().unwrap_or_default();
                Err(format!("{python}: {last}; run python/environment, or give --python"))
            }
            Err(error) => Err(format!("{python}: {error}; run python/environment")),
        }
    }

    fn describe(&self) -> String {
        let (hosts, gpus) = (self.plan.workers, self.plan.ranks_per_host);
        let device = if self.is_cuda { "GPUs" } else { "CPU ranks" };
        let (servers, cores) = (self.plan.extra_servers, self.plan.cores);
        let beside = if self.plan.colocated { " and a server" } else { "" };
        let shared = match self.is_cuda && self.ranks() > self.gpus {
            true => format!("; all share {} GPUs of this machine", self.gpus),
            false => String::new(),
        };
        format!(
            "{hosts} hosts with {gpus} {device}{beside} each, {servers} server hosts; \
             {cores} cores a server{shared}"
        )
    }

    /// Adds what all results have.
    fn complete(&self, rate: u64, mut fields: Fields) -> Fields {
        fields.extend(link_fields(&self.shape, &self.plan));
        fields.extend(report::fields(json!({
            "device": if self.is_cuda { "cuda" } else { "cpu" },
            "framework": if self.framework == Framework::Jax { "jax" } else { "torch" },
            "hosts": self.plan.workers, "gpus_per_host": self.plan.ranks_per_host,
            "ranks_per_gpu": if self.is_cuda { self.ranks().div_ceil(self.gpus) } else { 0 },
            "servers": self.plan.extra_servers, "colocated": self.plan.colocated,
            "cores": self.plan.cores, "rounds": self.rounds, "rate_bits": rate,
        })));
        fields
    }
}

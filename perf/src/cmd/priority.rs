//! `bps-perf priority`: how long an urgent tensor takes that becomes ready behind a bulk, between
//! hosts with shaped links (see `cluster`).
//!
//! It is told beside what the credit promises: an urgent part never waits behind more than the
//! bytes that were handed to the network before it. The limit is the time of two credits on the
//! wire and of the urgent tensor itself, there and back.

#![forbid(unsafe_code)]

use super::cluster::{link_arguments, link_fields, shape, variables};
use crate::arguments::{integer, number};
use crate::report::{self, Table};
use crate::sample::Series;
use crate::stage::job::{Job, PATIENCE, Plan};
use crate::stage::{Stage, stream, unavailable};
use crate::{Outcome, sample};
use bps_engine::config::{Program, load};
use clap::{Arg, ArgMatches, Command};
use serde_json::json;

/// Time of one burst of the bare stream, milliseconds.
const BURST_MS: u64 = 2000;

/// The arguments.
pub fn command() -> Command {
    let size = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("BYTES")
            .help(help)
            .value_parser(sample::parse_size)
            .default_value(default)
    };
    let command = Command::new("priority")
        .about(
            "Measures how long an urgent tensor takes behind ready bulk on a shaped link, beside \
             what the credit promises.",
        )
        .arg(number("workers", "1", "Hosts with a rank"))
        .arg(number("servers", "1", "Hosts with a server"))
        .arg(number("cores", "1", "Polling threads of each server"))
        .arg(number("rounds", "6", "Bulks"))
        .arg(size("bulk", "256M", "Bytes of the bulk"))
        .arg(size("urgent", "64K", "Bytes of the urgent tensor"));
    link_arguments(command)
}

/// Measures on a stage of its own.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| integer(matches, name);
    let size = |name: &str| *matches.get_one::<usize>(name).expect("has a default");
    let plan = Plan {
        workers: get("workers"),
        ranks_per_host: 1,
        extra_servers: get("servers"),
        colocated: false,
        cores: get("cores"),
        patience: PATIENCE,
        variables: variables(matches),
    };
    if let Some(why) = unavailable() {
        println!("skipped: {why}");
        return Ok(());
    }
    let credit = credit_bytes(&plan)?;
    let shape = shape(matches);
    let stage = Stage::new(plan.hosts(), &shape)?;
    let (bulk, urgent) = (size("bulk"), size("urgent"));
    let arguments =
        ["stage-overtake".into(), bulk.to_string(), urgent.to_string(), "1".to_string()];
    let mut line = stream::crew(&stage)?;
    let mut rates = line.work(&BURST_MS.to_string())?.concat();
    let mut job = Job::start(&stage, &plan, &arguments)?;
    let (mut bulks, mut urgents) = (Vec::new(), Vec::new());
    // The first bulk grows windows and page tables.
    job.ranks.work("bulk")?;
    for _ in 0..get("rounds") {
        for rank in job.ranks.work("bulk")? {
            bulks.extend(rank.first());
            urgents.extend(rank.iter().skip(1));
        }
    }
    job.end()?;
    rates.extend(line.work(&BURST_MS.to_string())?.concat());
    line.end()?;
    if urgents.is_empty() {
        return Err("no urgent push fitted into a bulk: give a larger --bulk".into());
    }
    let (rates, bulks, urgents) = (Series(rates), Series(bulks), Series(urgents));
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let wire_ms = |bytes: usize| bytes as f64 / rates.median() * 1e3;
    let limit = wire_ms(2 * credit + 2 * urgent);
    let ms = |series: &Series, share: f64| series.quantile(share) * 1e3;
    let title = format!(
        "{urgent} bytes that become urgent behind {bulk}; {} workers, {} servers; the limit is two \
         credits of {credit} bytes, and the tensor itself there and back, on the wire",
        plan.workers, plan.extra_servers
    );
    let columns =
        ["ms_p50", "ms_p90", "ms_p99", "ms_max", "limit_ms", "is_within", "bulk_ms", "line_gbs"];
    let table = Table::new(matches, "priority", &title, &columns);
    table.head();
    let mut fields = report::fields(json!({
        "workers": plan.workers, "servers": plan.extra_servers, "cores": plan.cores,
        "bulk_bytes": bulk, "urgent_bytes": urgent, "samples": urgents.0.len(),
        "ms_p50": ms(&urgents, 0.5), "ms_p90": ms(&urgents, 0.9), "ms_p99": ms(&urgents, 0.99),
        "ms_max": ms(&urgents, 1.0), "bulk_ms": ms(&bulks, 0.5), "credit_bytes": credit,
        "credit_ms": wire_ms(credit), "limit_ms": limit,
        "is_within": u8::from(ms(&urgents, 0.99) <= limit), "line_gbs": rates.median() / 1e9,
    }));
    fields.extend(link_fields(&shape, &plan));
    table.row(fields);
    Ok(())
}

/// The credit of a rank of such a job.
fn credit_bytes(plan: &Plan) -> Result<usize, String> {
    let lookup = |name: &str| {
        let found = plan.variables.iter().rev().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone())
    };
    let lanes = (plan.extra_servers * plan.cores) as usize;
    match load(Program::Worker, [], &lookup).map_err(|error| error.to_string())? {
        bps_engine::config::Outcome::Run(loaded) => {
            Ok(bps_worker::credit_bytes(&loaded.config, lanes))
        }
        bps_engine::config::Outcome::Print(_) => Err("no argument asks to print".to_string()),
    }
}

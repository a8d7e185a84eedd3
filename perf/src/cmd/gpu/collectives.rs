//! Sums of one tensor over all ranks: ours, NCCL's all-reduce, the best that can be made of NCCL by
//! hand where hosts have several GPUs, and NCCL as somebody tuned it.

use super::hosts::Hosts;
use super::{Framework, Run};
use crate::report::{self, Fields};
use crate::sample::Series;
use serde_json::json;

/// Rounds that are not timed: they grow windows, buffers and page tables.
const WARM_UP: u32 = 2;

/// What ranks are told.
pub fn order(way: &str, size: usize) -> String {
    format!("collective {way} {size}")
}

/// The result of one size.
pub fn measure(run: &Run, hosts: &mut Hosts, size: usize) -> Result<Fields, String> {
    let is_torch = run.framework == Framework::Torch;
    let mut ways = vec![("", "ours")];
    // JAX's processes on CPUs look for each other by names, which staged hosts have none of.
    if is_torch || run.is_cuda {
        ways.push(("peer_", "peer"));
    }
    if run.ways.iter().any(|way| way == "group") {
        ways.push(("group_", "group"));
    }
    // One host or one GPU a host has no two levels, and gloo has no reduce-scatter.
    if is_torch && run.is_cuda && run.plan.workers > 1 && run.plan.ranks_per_host > 1 {
        ways.push(("hierarchical_", "hierarchical"));
    }
    let mut all: Vec<(&str, Series)> =
        ways.iter().map(|(field, _)| (*field, Series::default())).collect();
    let mut tuned = Series::default();
    let mut line = Series(hosts.line()?);
    for round in 0..WARM_UP + run.rounds {
        for turn in 0..ways.len() {
            let index = (round as usize + turn) % ways.len();
            let seconds = hosts.slowest(&order(ways[index].1, size))?;
            all[index].1.0.extend((round >= WARM_UP).then_some(seconds));
        }
        let seconds = hosts.slowest_tuned(&order("peer", size))?;
        tuned.0.extend(seconds.filter(|_| round >= WARM_UP));
    }
    if !tuned.0.is_empty() {
        all.push(("tuned_", tuned));
    }
    line.0.extend(hosts.line()?);
    Ok(report(run, size, &all, &line))
}

/// The fields: ours first, then those of its peers.
fn report(run: &Run, size: usize, all: &[(&str, Series)], line: &Series) -> Fields {
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let gigabytes = size as f64 / 1e9;
    let mut fields = report::fields(json!({ "work": "sum", "size_bytes": size }));
    for (name, series) in all {
        report::rate(&mut fields, &format!("{name}algbw_gbs"), gigabytes, series);
        fields.insert(format!("{name}ms_p50"), (series.median() * 1e3).into());
    }
    let ours = all[0].1.median();
    if let Some((_, peer)) = all.get(1) {
        let peers = all[1..].iter().filter(|(name, _)| *name != "group_");
        let peers = peers.map(|(_, series)| series.median());
        let best = peers.fold(f64::INFINITY, f64::min);
        fields.insert("ratio".into(), (peer.median() / ours).into());
        fields.insert("ratio_to_best".into(), (best / ours).into());
    }
    if !line.0.is_empty() {
        let line_gbs = line.median() / 1e9;
        let fraction = gigabytes / ours / line_gbs;
        fields.insert("line_gbs".into(), line_gbs.into());
        fields.insert("fraction_of_line".into(), fraction.into());
        fields.insert("fraction_of_optimum".into(), (fraction * run.plan.optimum()).into());
    }
    fields
}

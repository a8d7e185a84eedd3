//! Losses of runs on real data from the same seeds: how far ours lie from those of
//! DistributedDataParallel, beside how far two runs of that lie from each other.

use super::Run;
use super::hosts::Hosts;
use crate::report::{self, Fields};
use serde_json::json;

/// The losses of one run: the mean over all ranks, by step.
type Curve = Vec<f64>;

/// A result for each way beside DistributedDataParallel, of those that send as much.
pub fn measure(
    run: &Run,
    hosts: &mut Hosts,
    model: &str,
    precision: &str,
) -> Result<Vec<Fields>, String> {
    let mut curves: Vec<Vec<Curve>> = vec![Vec::new(); run.ways.len()];
    for _ in 0..run.loss_runs {
        for (way, runs) in run.ways.iter().zip(&mut curves) {
            let order = format!("losses {model} {precision} {way} {}", run.loss_steps);
            runs.push(mean(&hosts.work(&order)?));
        }
    }
    let mut results = Vec::new();
    for (way, runs) in run.ways.iter().zip(&curves) {
        let peer = if way.ends_with("-bf16") { "ddp-bf16" } else { "ddp" };
        let Some(other) = run.ways.iter().position(|other| other == peer && way != peer) else {
            continue;
        };
        let theirs = &curves[other];
        let across = runs.iter().flat_map(|own| theirs.iter().map(move |one| distance(own, one)));
        let within = (0..theirs.len()).flat_map(|last| (0..last).map(move |first| (first, last)));
        let within = within.map(|(first, last)| distance(&theirs[first], &theirs[last]));
        let (difference, noise) = (largest(across), largest(within));
        let last = |runs: &[Curve]| runs.first().and_then(|one| one.last().copied());
        results.push(report::fields(json!({
            "work": format!("losses of {model}"), "precision": precision, "way": way,
            "peer": peer, "steps": run.loss_steps, "runs": run.loss_runs,
            "first_loss": runs.first().and_then(|one| one.first().copied()),
            "last_loss": last(runs), "peer_last_loss": last(theirs),
            "difference": difference, "noise": noise,
            // Where the peer repeats itself to the bit, there is no noise to compare with.
            "ratio_to_noise": (noise > 0.0).then(|| difference / noise),
        })));
    }
    Ok(results)
}

fn mean(ranks: &[Vec<f64>]) -> Curve {
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    #[allow(clippy::cast_precision_loss, reason = "few ranks")]
    let count = ranks.len() as f64;
    (0..steps).map(|step| ranks.iter().map(|rank| rank[step]).sum::<f64>() / count).collect()
}

/// The mean distance of two curves, step by step.
fn distance(one: &Curve, other: &Curve) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "hundreds of steps")]
    let count = one.len().max(1) as f64;
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).sum::<f64>() / count
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_means_over_ranks_and_lie_apart_by_step() {
        let one = mean(&[vec![1.0, 3.0], vec![3.0, 5.0]]);
        assert_eq!(one, [2.0, 4.0]);
        assert_eq!(distance(&one, &vec![2.0, 3.0]), 0.5);
        assert_eq!(largest([0.25, 0.5, 0.0].into_iter()), 0.5);
    }
}

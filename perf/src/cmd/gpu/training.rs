//! Steps of training: by each way, the forward pass alone, and a step without communication.
//!
//! Invariant: every way has a copy of the model of its own, and the ways' order turns with the
//! round.

use super::hosts::Hosts;
use super::{Framework, Run};
use crate::report::{self, Fields};
use crate::sample::Series;
use serde_json::json;

/// Steps of each way that are not timed, for each rate of the links.
const WARM_UP: u32 = 2;
/// Ways that send nothing.
const SILENT: [&str; 2] = ["forward", "alone"];

/// What ranks are told.
fn order(way: &str, steps: u32) -> String {
    format!("steps {way} {steps}")
}

/// A model that all ranks have made, a copy for each way.
pub struct Model {
    name: String,
    precision: String,
    ways: Vec<String>,
    parameters: f64,
}

impl Model {
    /// Has all ranks make it.
    pub fn make(
        run: &Run,
        hosts: &mut Hosts,
        name: &str,
        precision: &str,
    ) -> Result<Model, String> {
        let silent = SILENT.iter().map(|way| (*way).to_string());
        let ways: Vec<String> = silent.chain(run.ways.iter().cloned()).collect();
        let answers = hosts.work(&format!("model {name} {precision} {}", ways.join(",")))?;
        let parameters = answers.concat().first().copied().unwrap_or(f64::NAN);
        Ok(Model { name: name.to_string(), precision: precision.to_string(), ways, parameters })
    }

    /// A result for each way that sends something.
    pub fn measure(&mut self, run: &Run, hosts: &mut Hosts) -> Result<Vec<Fields>, String> {
        let mut times = vec![Series::default(); self.ways.len()];
        let mut line = Series(hosts.line()?);
        for way in &self.ways {
            hosts.work(&order(way, WARM_UP))?;
        }
        for round in 0..run.rounds as usize {
            for turn in 0..self.ways.len() {
                let index = (round + turn) % self.ways.len();
                let order = order(&self.ways[index], run.steps);
                times[index].0.push(hosts.slowest(&order)?);
            }
        }
        line.0.extend(hosts.line()?);
        let sending = SILENT.len()..self.ways.len();
        Ok(sending.map(|index| self.report(run, &times, index, &line)).collect())
    }

    /// The name of each way that goes through the engine, and what ranks are told to go it.
    pub fn ways_of_ours(&self, run: &Run) -> Vec<(String, String)> {
        let is_ours = |way: &&String| !way.starts_with("ddp") && !SILENT.contains(&way.as_str());
        let of_way = |way: &String| {
            (format!("{}-{}-{way}", self.name, self.precision), order(way, run.steps))
        };
        self.ways.iter().filter(is_ours).map(of_way).collect()
    }

    fn report(&self, run: &Run, times: &[Series], index: usize, line: &Series) -> Fields {
        let way = &self.ways[index];
        let (kind, wire) = way.split_once('-').unwrap_or((way, ""));
        let bytes = self.parameters
            * match wire {
                "" => 4.0,
                "bf16" => 2.0,
                // A byte each, and a scale of four for 128.
                _ => 1.0 + 4.0 / 128.0,
            };
        let (forward, alone) = (times[0].median(), times[1].median());
        let step = times[index].median();
        // Communication begins when the forward pass is over, unless the next one hides it too.
        let line_rate = if line.0.is_empty() { f64::INFINITY } else { line.median() };
        let sent = bytes * run.plan.optimum() / line_rate;
        let bound = alone.max(if kind == "cross" { sent } else { forward + sent });
        let of_words = ["bert", "gpt"].iter().any(|kind| self.name.starts_with(kind));
        let mut fields = report::fields(json!({
            "work": self.name, "precision": self.precision, "way": way,
            "batch": if of_words { run.sequences } else { run.batch },
            "steps": run.steps, "ms_p50": step * 1e3, "forward_ms": forward * 1e3,
            "alone_ms": alone * 1e3, "parameters": self.parameters, "wire_bytes": bytes,
            "bound_ms": bound * 1e3, "ratio_to_bound": step / bound,
            "ratio_to_alone": step / alone,
        }));
        if line_rate.is_finite() {
            fields.insert("line_gbs".into(), (line_rate / 1e9).into());
        }
        let milliseconds = times[index].0.iter().map(|seconds| seconds * 1e3).collect();
        report::cost(&mut fields, "step_ms", &Series(milliseconds));
        // Each is held against what sends as many bytes, and what no other can send against what
        // sends all.
        let peer = match (run.framework, wire) {
            (Framework::Torch, "") => "ddp",
            (Framework::Torch, "bf16") => "ddp-bf16",
            (Framework::Jax, "") => "psum",
            _ => kind,
        };
        if let Some(other) = self.ways.iter().position(|other| other == peer && way != peer) {
            fields.insert("peer".into(), peer.into());
            fields.insert("peer_ms_p50".into(), (times[other].median() * 1e3).into());
            fields.insert("peer_spread".into(), times[other].spread().into());
            fields.insert("ratio".into(), (times[other].median() / step).into());
        }
        fields
    }
}

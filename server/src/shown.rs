//! What a server shows of itself: statistics for the scheduler with each heartbeat, and a page of
//! its own if its settings ask for one. Used by the control threads alone.

#![forbid(unsafe_code)]

use bps_engine::config::{Config, Program};
use bps_engine::host;
use bps_engine::metrics::{self, Collector, Exporter, MetricsError};
use bps_engine::proto::messages::Statistics;
use bps_engine::proto::scheduler::{NodeRole, NodeView};
use bps_engine::trace::log;
use std::sync::{Arc, Mutex, PoisonError};

/// This server as of its last heartbeat.
#[derive(Default)]
pub(crate) struct Shown(Mutex<Option<NodeView>>);

impl Shown {
    /// Shows it over HTTP, if that is wanted, until the exporter is dropped.
    pub(crate) fn serve(
        self: &Arc<Self>,
        config: &Config,
    ) -> Result<Option<Exporter>, MetricsError> {
        let shown = Arc::clone(self);
        let source = move || {
            let node = shown.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Some(metrics::page(None, node.as_slice()))
        };
        let exporter = metrics::serve(Program::Server, config, source)?;
        if let Some(exporter) = &exporter {
            log::info!("metrics on http://{}/metrics", exporter.address());
        }
        Ok(exporter)
    }

    /// Takes new statistics. There are none for the scheduler before the job is formed, when a
    /// server has no number.
    pub(crate) fn take(&self, index: Option<u32>, collector: &mut Collector) -> Option<Statistics> {
        let statistics = collector.take();
        let node = NodeView {
            role: NodeRole::Server,
            index: index?,
            host: host::name(),
            pid: std::process::id(),
            silent: None,
            statistics: Some(statistics.clone()),
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(node);
        Some(statistics)
    }
}

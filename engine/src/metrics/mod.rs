//! Metrics for people and for Prometheus: the one table of them, the page that shows them, and the
//! small HTTP server that hands the page out.
//!
//! Used by control threads of servers, workers and the scheduler. Invariant: nothing here runs on a
//! polling thread, and the labels of a metric are nodes and cores, never keys or tensors, so that a
//! page is bounded by the size of the job.

#![forbid(unsafe_code)]

mod collect;
mod families;
mod http;
mod page;

pub use collect::Collector;
pub use families::{FAMILIES, Family, Kind, document};
pub use http::Exporter;
pub use page::page;

use crate::config::{Config, Program};
use std::net::{IpAddr, SocketAddr};

/// Why metrics that were asked for cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// `BPS_METRICS_ADDRESS` is no address.
    #[error(
        "BPS_METRICS_ADDRESS={0} is no IP address: give one of this machine, 127.0.0.1 for this \
         machine alone, or 0.0.0.0 for everybody"
    )]
    Address(String),
    /// The port cannot be listened on.
    #[error("can't show metrics on {address}: {error}: {remedy}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the kernel said.
        error: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
}

/// Shows the metrics of a scheduler or a server, if its settings ask for it.
///
/// # Errors
/// See [`MetricsError`].
pub fn serve(
    program: Program,
    config: &Config,
    source: impl Fn() -> Option<String> + Send + 'static,
) -> Result<Option<Exporter>, MetricsError> {
    let (port, remedy) = match program {
        Program::Server => (
            config.server_metrics_port,
            "choose another BPS_SERVER_METRICS_PORT, or 0 for one that is free, and an address of \
             this machine as BPS_METRICS_ADDRESS",
        ),
        _ => (
            config.metrics_port,
            "choose another BPS_METRICS_PORT, or 0 for one that is free, and an address of this \
             machine as BPS_METRICS_ADDRESS",
        ),
    };
    let Some(port) = port else { return Ok(None) };
    let wrong = || MetricsError::Address(config.metrics_address.clone());
    let ip: IpAddr = config.metrics_address.parse().map_err(|_| wrong())?;
    let port = u16::try_from(port).expect("the table of settings takes no larger port");
    let address = SocketAddr::new(ip, port);
    let started = Exporter::start(address, source);
    started.map(Some).map_err(|error| MetricsError::Listen { address, error, remedy })
}

//! The gRPC service of the device plugin, which the kubelet calls.
//!
//! ```text
//! kubelet ──GetDevicePluginOptions──> which calls are served
//!         ──ListAndWatch────────────> all seats, and again after each change
//!         ──GetPreferredAllocation──> a choice of seats            `preference`
//!         ──Allocate────────────────> CDI devices of a container   `allocation`
//! ```

use futures_util::{Stream, stream};
use tokio::sync::watch;
use tonic::{Request, Response, Status, body::Body, codegen::http, server::Grpc};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::{
    allocation::allocate,
    messages::{
        AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse,
        DevicePluginOptions, Empty, ListAndWatchResponse, PreferredAllocationRequest,
        PreferredAllocationResponse,
    },
    preference,
    seats::SeatList,
};
use crate::{
    error_chain,
    node::dra::{
        cdi_lookup::CdiLookup,
        services::{try_unary, unknown},
    },
};

/// Path of the gRPC method that returns the plugin's options.
pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
/// Path of the method that lists the seats.
pub const LIST: &str = "/v1beta1.DevicePlugin/ListAndWatch";
/// Path of the method that chooses among free seats.
pub const PREFER: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
/// Path of the method that returns the CDI devices of a container.
pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
/// Maximum number of open streams of the seat list. A kubelet opens one stream.
const MAX_WATCHERS: usize = 16;

/// Returns the optional calls of this plugin that the kubelet may use.
#[must_use]
pub fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// The gRPC service of the device plugin, with the seats that it offers.
#[derive(Clone)]
pub struct SeatService {
    /// Channel through which the list of seats reaches the streams of the kubelet. Only these
    /// streams have a receiver, so the number of receivers shows whether a kubelet watches the
    /// list.
    pub seats: watch::Sender<SeatList>,
    /// Finds the CDI devices of the GPUs.
    pub lookup: CdiLookup,
}

impl SeatService {
    /// Answers a request of the kubelet.
    pub async fn answer(self, request: http::Request<Body>) -> http::Response<Body> {
        match request.uri().path() {
            OPTIONS => try_unary(request, async |_: Empty| Ok(options())).await,
            LIST => self.list(request).await,
            PREFER => {
                let prefer = async move |asked| Ok(self.prefer(asked));
                try_unary(request, prefer).await
            }
            ALLOCATE => {
                let allocate = async move |asked| self.allocate(asked);
                try_unary(request, allocate).await
            }
            other => unknown(other),
        }
    }

    async fn list(self, request: http::Request<Body>) -> http::Response<Body> {
        let answer = service_fn(move |_: Request<Empty>| {
            let lists = match self.seats.receiver_count() < MAX_WATCHERS {
                true => Ok(Response::new(lists(self.seats.subscribe()))),
                false => {
                    Err(Status::resource_exhausted("too many clients watch the list of devices"))
                }
            };
            std::future::ready(lists)
        });
        let codec = ProstCodec::<ListAndWatchResponse, Empty>::default();
        Grpc::new(codec).server_streaming(answer, request).await
    }

    fn prefer(&self, asked: PreferredAllocationRequest) -> PreferredAllocationResponse {
        let seats = self.seats.borrow();
        let choices = asked.container_requests.into_iter().map(|one| {
            let size = usize::try_from(one.allocation_size).unwrap_or(0);
            let (free, included) = (&one.available_device_ids, &one.must_include_device_ids);
            let device_ids = preference::choose(&seats, free, included, size);
            ContainerPreferredAllocationResponse { device_ids }
        });
        PreferredAllocationResponse { container_responses: choices.collect() }
    }

    fn allocate(&self, asked: AllocateRequest) -> Result<AllocateResponse, Status> {
        let seats = self.seats.borrow().clone();
        let one = |ids: &[String]| allocate(&seats, &self.lookup, ids);
        let answers = asked.container_requests.iter().map(|request| one(&request.device_ids));
        match answers.collect() {
            Ok(container_responses) => Ok(AllocateResponse { container_responses }),
            Err(error) => {
                let why = error_chain::chain(&error);
                tracing::warn!("device plugin: a container does not get its GPU: {why}");
                Err(Status::failed_precondition(why))
            }
        }
    }
}

/// Returns a stream of the list of seats. It yields the present list at once, and the new list
/// after each change.
fn lists(
    mut seats: watch::Receiver<SeatList>,
) -> impl Stream<Item = Result<ListAndWatchResponse, Status>> + Send + 'static {
    seats.mark_changed();
    stream::unfold(seats, |mut seats| async move {
        seats.changed().await.ok()?;
        let list = seats.borrow_and_update().devices();
        Some((Ok(list), seats))
    })
}

#[cfg(test)]
mod tests;

//! Jobs: programs that users run without a container. This module admits jobs, and finds them again
//! after a restart of the controller.

use std::io;

use super::{actor::NodeActor, containers};
use crate::{
    error_chain,
    handle::CommandError,
    jobs::{JobFolder, JobRefusal, JobReply, JobRequest, JobUser, MAX_JOBS, kept, permit},
};

/// Reason why the controller did not admit a job.
#[derive(Debug, thiserror::Error)]
pub(super) enum JobError {
    #[error(transparent)]
    Refused(#[from] JobRefusal),
    #[error("user {0} already has {MAX_JOBS} jobs, which is the maximum: end a job first")]
    TooMany(String),
    #[error("cannot create the job's folder")]
    Folder(#[source] io::Error),
    #[error(transparent)]
    Announcement(#[from] CommandError),
}

/// Creates a job and its folder, if the user is allowed to run it.
pub(super) fn job(
    actor: &mut NodeActor,
    request: JobRequest,
    user: &JobUser,
) -> Result<JobReply, JobError> {
    let request = permit(request, user, &actor.config.jobs.users)?;
    if actor.job_users.values().filter(|uid| **uid == user.uid).count() >= MAX_JOBS {
        return Err(JobError::TooMany(user.name.clone()));
    }
    let job = JobFolder::make(&actor.run_dir, request, user).map_err(JobError::Folder)?;
    let warnings = announce_job(actor, &job).inspect_err(|_| job.remove())?;
    tracing::info!(key = %job.key(), user = user.name, "job {}: started", job.key());
    let [folder, lock] = [job.mount(), job.lock()].map(|path| path.display().to_string());
    Ok(JobReply::Granted { folder, lock, warnings })
}

/// Announces again all jobs that an earlier controller admitted. Jobs that have ended since then
/// are garbage-collected like containers.
pub(super) fn recall_jobs(actor: &mut NodeActor) {
    let jobs = kept(&actor.run_dir).unwrap_or_else(|error| {
        tracing::error!(%error, "controller: cannot list the jobs of an earlier controller, so \
                                 these jobs run unmanaged");
        Vec::new()
    });
    for job in jobs {
        if let Err(error) = announce_job(actor, &job) {
            tracing::error!(key = %job.key(), "job {}: runs unmanaged: {}", job.key(), error_chain::chain(&error));
        }
    }
}

fn announce_job(actor: &mut NodeActor, job: &JobFolder) -> Result<Vec<String>, CommandError> {
    let spec = job.spec();
    let (policy, _) = spec.policy(&actor.config.settings().policies);
    if let Err(error) = job.write_engine(policy.engine) {
        // Without the file, allocations use the engine checkpoint until the controller's first
        // message.
        tracing::warn!(key = %job.key(), %error, "job {}: cannot write the file that names its engine. Until the controller's first message, its processes use the engine checkpoint", job.key());
    }
    let warnings = containers::announce(actor, job.key().clone(), spec)?;
    // Last, so that a job that was not admitted does not count as one of its user's jobs.
    actor.job_users.insert(job.key().clone(), job.uid());
    Ok(warnings)
}

// Drives the client that openapi-generator wrote, as a service in TypeScript would: main.js URL KEY
import { BatchAnswer, Configuration, FleetApi, Job, JobsApi, Problem, ProblemFromJSON, ResponseError } from "./client";

declare const process: { argv: string[] };

async function main(url: string, key: string): Promise<void> {
  const configuration = new Configuration({ basePath: url, accessToken: key });
  const jobs = new JobsApi(configuration);

  const submitted: Job = await jobs.submitJob({
    submitJob: {
      clientRequestId: "ts-1",
      jobName: "from TypeScript",
      jobHandler: "echo",
      params: { text: "Grüße", list: [1, 2.5, null] },
    },
  });
  equal(submitted.status, "WAITING");

  const ended: Job = await jobs.getJob({ jobId: submitted.jobId, wait: 30 });
  equal(ended.status, "SUCCEEDED");
  equal(ended.result, { text: "Grüße", list: [1, 2.5, null] });
  equal(ended.createdAt instanceof Date, true);
  equal(ended.error, null);
  equal(ended.executions.length, 1);

  const repeated = await jobs.submitJobRaw({
    submitJob: {
      clientRequestId: "ts-1",
      jobName: "from TypeScript",
      jobHandler: "echo",
      params: { text: "Grüße", list: [1, 2.5, null] },
    },
  });
  equal(repeated.raw.status, 200);
  equal((await repeated.value()).jobId, submitted.jobId);

  const conflict = await refused(
    jobs.submitJob({ submitJob: { clientRequestId: "ts-1", jobName: "another", jobHandler: "echo" } }),
  );
  equal([conflict.status, conflict.code], [409, "request_conflict"]);
  equal(conflict.jobId, submitted.jobId);
  equal(conflict.fields, ["jobName", "params"]);

  const invalid = await refused(
    jobs.submitJob({ submitJob: { clientRequestId: "ts-2", jobName: "", jobHandler: "echo" } }),
  );
  equal([invalid.status, invalid.code], [422, "validation_failed"]);
  equal(invalid.errors?.map((one) => one.pointer), ["/jobName"]);

  const missing = await refused(jobs.getJob({ jobId: 4_000_000_000_000_000 }));
  equal([missing.status, missing.code], [404, "job_not_found"]);

  const batch: BatchAnswer = await jobs.submitJobs({
    submitBatch: {
      jobs: [
        { clientRequestId: "ts-3", jobName: "a", jobHandler: "echo" },
        { clientRequestId: "ts-4", jobName: "", jobHandler: "echo" },
      ],
    },
  });
  equal(batch.items.map((item) => item.httpStatus), [202, 422]);

  const first = await jobs.listJobs({ limit: 1 });
  equal(first.items.length, 1);
  const next = await jobs.listJobs({ limit: 1, cursor: first.nextCursor ?? undefined });
  equal(next.items.map((job) => job.jobId), [submitted.jobId]);

  const workers = await new FleetApi(configuration).getWorkers();
  equal(workers.items.map((worker) => worker.state), ["UP"]);

  const keyless = new JobsApi(new Configuration({ basePath: url }));
  equal((await refused(keyless.getJob({ jobId: submitted.jobId }))).code, "unauthorized");

  console.log(`job ${submitted.jobId}`);
}

async function refused(call: Promise<unknown>): Promise<Problem> {
  try {
    await call;
  } catch (error) {
    if (error instanceof ResponseError) {
      equal(error.response.headers.get("content-type"), "application/problem+json");
      return ProblemFromJSON(await error.response.json());
    }
    throw error;
  }
  throw new Error("it was not refused");
}

function equal(found: unknown, wanted: unknown): void {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) {
    throw new Error(`found ${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
  }
}

main(process.argv[2], process.argv[3]);

"""When schedules fire: cron and intervals (pure), misfires (pure), and the preview."""
